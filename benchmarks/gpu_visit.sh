#!/usr/bin/env bash
# Everything that only a GPU can show, in one run: tests, profile, experiment, throughput.
#
#   bash benchmarks/gpu_visit.sh [tests] [kernels] [profile] [experiment] [bench] [jobs] [host] [auto]
#
# Without names: the first four. bench, jobs, host and auto measure Llama-3.1-8B shapes on dummy weights, bench
# and jobs on such as vLLM has, with which they are compared.
#
# RESULTS: folder for records and logs (default benchmarks/results). LIMIT: seconds a part may take.
# WORKERS: processes that share the tests.
set -u
cd "$(dirname "$0")/.."
RESULTS=${RESULTS:-benchmarks/results}
LIMIT=${LIMIT:-300}
WORKERS=${WORKERS:-12}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$RESULTS"
# Compiling is what takes the time, so it is spread over the cores; an interrupt still reports.
run_tests() {
  log=$RESULTS/$1.log
  timeout -s INT -k 15 "$LIMIT" python3 -W ignore -m pytest "${@:2}" -o addopts= -v --tb=short \
    -n "$WORKERS" --dist worksteal --durations=15 -o faulthandler_timeout=60 \
    -p no:cacheprovider > "$log" 2>&1
  grep -E "FAILED|ERROR|^E  |passed|failed" "$log" | cut -c1-200 | tail -40
}

parts=${*:-tests kernels profile experiment}

for part in $parts; do
  echo "== $part"
  started=$SECONDS
  case $part in
    tests) run_tests gpu_tests tests/gpu tests/models/test_host_memory.py ;;
    kernels)  # the tests that a CPU runs in Triton's interpreter, compiled
      run_tests gpu_kernel_tests tests/kernels ;;
    profile)
      timeout "$LIMIT" python3 -m benchmarks.decode_profile --model built-in --rows 64 --k 3 \
        --draft-sample gumbel --output-dir "$RESULTS" --name profile_step_h200 | tail -30 ;;
    experiment)  # long completions, since prompts are launched by the host; cells in turns, five rounds
      for temperature in 1.0 0.0; do
        timeout "$LIMIT" python3 -m benchmarks.draft_sample --k 3,7 --n 8 --max-tokens 128 --rounds 5 \
          --temperature "$temperature" --output-dir "$RESULTS" \
          --name "draft_sample_t${temperature%.0}_h200" | tail -8
      done ;;
    bench)  # fixed draft lengths, then the one that is chosen
      for draft in "--no-draft" \
                   "--synthetic-acceptance 2.5 --num-speculative-tokens 3" \
                   "--synthetic-acceptance 2.5 --num-speculative-tokens 3 --draft-sample gumbel" \
                   "--synthetic-acceptance 2.5"; do
        # shellcheck disable=SC2086 - flags are words
        timeout "$LIMIT" python3 -m specgen bench --model llama-3.1-8b --batch-size 1,8,64,256 \
          --input-len 256 --output-len 256 --load-format dummy-uniform $draft |
          python3 -m benchmarks.record | tee -a "$RESULTS/bench_llama-3.1-8b.jsonl" |
          cut -c1-330
      done ;;
    jobs)
      for draft in "--no-draft" "--synthetic-acceptance 2.5"; do
        for job in mixed shared-prefix; do
          # shellcheck disable=SC2086
          timeout "$LIMIT" python3 -m specgen bench --model llama-3.1-8b --job $job \
            --max-num-seqs 256 --load-format dummy-uniform $draft |
            python3 -m benchmarks.record | tee -a "$RESULTS/bench_jobs_llama-3.1-8b.jsonl" |
            cut -c1-330
        done
      done ;;
    host)  # waits between steps, and the bandwidth of the kernels
      timeout "$LIMIT" python3 -m benchmarks.decode_profile --rows 1,64,256 --k 0,3 \
        --output-dir "$RESULTS" --name decode_profile_h200 | tail -12
      timeout "$LIMIT" python3 -m benchmarks.kernel_bandwidth --output-dir "$RESULTS" | tail -30 ;;
    auto)  # the chosen draft length against every fixed one; takes some 250 s
      timeout "$LIMIT" python3 -m benchmarks.auto_length --model llama-3.1-8b \
        --output-dir "$RESULTS" --name auto_length_h200 | tail -16 ;;
    *) echo "unknown part: $part" >&2; exit 2 ;;
  esac
  echo "== $part took $((SECONDS - started)) s"
done
