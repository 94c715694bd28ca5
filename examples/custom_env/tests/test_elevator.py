from elevator import Elevator

from rollweave import new_task


def test_the_right_way_ends_at_the_right_floor():
    for seed in range(30):
        env = Elevator()
        env.reset(new_task(seed=seed))
        while env.at != env.call:
            env.step("<up>" if env.at < env.call else "<down>")
        assert env.step("<open>").success


def test_nonsense_costs_a_little_and_a_wrong_floor_everything():
    env = Elevator()
    env.reset(new_task(seed=1))
    assert [env.step(text).reward for text in ("", "up", "<²>")] == [-0.1] * 3
    env.call = env.at + 1
    step = env.step(" <open>\n")
    assert (step.done, step.success, step.reward) == (True, False, 0.0)
