from lucky_number import LuckyNumber

from rollweave.envs.base import new_task


def test_halving_finds_every_number():
    for seed in range(30):
        env = LuckyNumber()
        env.reset(new_task(seed=seed))
        low, high = 1, 9
        while True:
            guess = (low + high) // 2
            step = env.step(f"<{guess}>")
            if step.done:
                assert step.success
                break
            low, high = (guess + 1, high) if step.messages[0].content == " higher" else (low, guess - 1)


def test_nonsense_costs_a_little():
    env = LuckyNumber()
    env.reset(new_task(seed=1))
    assert [env.step(text).reward for text in ("", "seven", "<²>")] == [-0.1] * 3
