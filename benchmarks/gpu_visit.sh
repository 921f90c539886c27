#!/usr/bin/env bash
# Everything that only a GPU can show, in one run: tests, profile, experiment, throughput.
#
#   bash benchmarks/gpu_visit.sh [tests] [kernels] [profile] [experiment]     (default: all four)
#
# RESULTS: folder for records and logs (default benchmarks/results). LIMIT: seconds a part may take.
set -u
cd "$(dirname "$0")/.."
RESULTS=${RESULTS:-benchmarks/results}
LIMIT=${LIMIT:-300}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$RESULTS"
parts=${*:-tests kernels profile experiment}

for part in $parts; do
  echo "== $part"
  started=$SECONDS
  case $part in
    tests)  # one process: the Triton compilations of several would be repeated
      timeout "$LIMIT" python3 -W ignore -m pytest tests/gpu -o addopts= -v --tb=short \
        -p no:cacheprovider > "$RESULTS/gpu_tests.log" 2>&1
      grep -E "FAILED|ERROR|^E  |passed|failed" "$RESULTS/gpu_tests.log" | cut -c1-200 | tail -40 ;;
    kernels)  # the tests that a CPU runs in Triton's interpreter, compiled
      timeout "$LIMIT" python3 -W ignore -m pytest tests/kernels -o addopts= -v --tb=short \
        -p no:cacheprovider > "$RESULTS/gpu_kernel_tests.log" 2>&1
      grep -E "FAILED|ERROR|^E  |passed|failed" "$RESULTS/gpu_kernel_tests.log" | cut -c1-200 | tail -40 ;;
    profile)
      timeout "$LIMIT" python3 -m benchmarks.profile_step --output-dir "$RESULTS" | tail -30 ;;
    experiment)  # long enough that prefill and start-up do not count: 16 samples a prompt
      for temperature in 1.0 0.0; do
        timeout "$LIMIT" python3 -m benchmarks.draft_sample --k 3,7 --n 16 \
          --temperature "$temperature" --output-dir "$RESULTS" \
          --name "draft_sample_t${temperature%.0}" | tail -8
      done ;;
    *) echo "unknown part: $part" >&2; exit 2 ;;
  esac
  echo "== $part took $((SECONDS - started)) s"
done
