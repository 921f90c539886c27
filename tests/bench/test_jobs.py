"""Lengths and prompts of what is measured."""

from __future__ import annotations

from specgen.bench.jobs import fixed_job, make_rows, mixed_job, shared_prefix_job


def test_the_mixed_job_is_the_published_one() -> None:
    job = mixed_job()
    assert len(job.lengths) == 1000
    assert sum(prompt for prompt, _ in job.lengths) == 198_335
    assert job.num_output_tokens == 300_717
    assert mixed_job(10).lengths == job.lengths[:10]


def test_the_shared_prefix_job() -> None:
    job = shared_prefix_job()
    assert set(job.lengths) == {(1550, 100)}
    assert (len(job.lengths), job.longest, job.num_output_tokens) == (2000, 1650, 200_000)
    rows = make_rows(shared_prefix_job(3), vocab_size=5000, temperature=1.0, seed=1)
    ids = [row.prompt_token_ids for row in rows]
    assert all(i is not None and len(i) == 1550 for i in ids)
    assert len({i[:1500] for i in ids if i}) == 1
    assert len({i[1500:] for i in ids if i}) == 3


def test_rows_run_to_their_length_with_other_prompts_for_another_seed() -> None:
    job = fixed_job(4, 7, 9)
    rows = make_rows(job, vocab_size=50, temperature=0.5, seed=1)
    assert len(rows) == 4
    for row in rows:
        assert row.prompt_token_ids is not None
        assert len(row.prompt_token_ids) == 7
        assert all(0 <= i < 50 for i in row.prompt_token_ids)
        assert row.sampling.ignore_eos
        assert (row.sampling.max_tokens, row.sampling.temperature) == (9, 0.5)
    others = make_rows(job, vocab_size=50, temperature=0.5, seed=2)
    prompts = {row.prompt_token_ids for row in (*rows, *others)}
    assert len(prompts) == 8  # nothing of a warm-up is in the cache of the run that counts
    assert len({row.sampling.seed for row in (*rows, *others)}) == 8  # nor are its draws repeated
    assert rows == make_rows(job, vocab_size=50, temperature=0.5, seed=1)
