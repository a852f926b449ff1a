"""DRF and Tetris on clusters small enough to be checked by hand; nodes have 3 CPUs and 60 GiB for each GPU."""

from host_builders import HUNGRY, MODEST, job, make_host, nodes_by_job, plan_of, shares_by_job


def test_drf_serves_the_user_with_the_smallest_share():
    # alice: 6 CPUs of 12, 1/2. bob's first job goes before her second, and his second (1/6 by then) too.
    jobs = [job(1, HUNGRY, user="alice"), job(2, HUNGRY, user="alice")]
    jobs += [job(3, MODEST, user="bob"), job(4, MODEST, user="bob")]
    plan = plan_of("drf", jobs, [make_host("a", 4, free_cpus=9.0)])
    assert shares_by_job(plan) == {1: (6, 10), 3: (1, 10), 4: (1, 10)}
    assert [item.job_id for item in plan.waiting] == [2]


def test_tetris_takes_the_best_match():
    # On an empty node the larger demand has the larger product: 2 before 1. Then a has 6 of 12 CPUs and 3 of 4 GPUs
    # left, b has all: 1 goes to b.
    plan = plan_of("tetris", [job(1, MODEST), job(2, HUNGRY)], [make_host("a"), make_host("b")])
    assert nodes_by_job(plan) == {1: "b", 2: "a"}
    plan = plan_of("tetris", [job(1, MODEST), job(2, HUNGRY)], [make_host("a", 1, cpus=6.0)])
    assert [solo.job_id for solo in plan.solo] == [2]
