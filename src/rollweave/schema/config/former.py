"""The settings of the version `v0.1.0-wide` that are gone, and what to write now.

An error about such a key in a file, and a table of `docs/MIGRATING.md`, say it.
"""

FORMER = {
    "ablation.sharing": "sharing in the file of `rollweave simulate --serving FILE`",
    "buffer.evict": "leave it out: the stalest groups leave a full buffer",
    "buffer.max_age": "rollout.alpha",
    "cluster.join_s": "leave it out: hosts have 10 minutes to join",
    "cluster.ray": "cluster.launcher, as ray:HOST:PORT",
    "engines.borrowed": "loans.engines, the number of engines, in place of the borrowed group",
    "faults": "leave it out: an environment of your own may fail, or wait as "
    "rollweave.envs.frozenlake:SlowLake does",
    "rewards.judge.url": "rewards.url",
    "rollout.engine_batch": "rollout.max_running, of which each engine has its share, or "
    "engines.max_slots, of which it has twice as many",
    "rollout.predictor": "ablation.policies, as one of the list",
    "sandbox.cache_dir": "the environment variable XDG_CACHE_HOME of each host",
    "sandbox.cache_gb": "leave it out: images have half of the file system of the cache",
    "sim.pools": "leave it out: pools.NAME.resource names the GPU, and the engines the hosts",
    "sim.serving": "the file of `rollweave simulate --serving FILE`, which has these keys",
    "sim.trainer_gpus": "trainer.ranks",
    "tasks.algorithm.aggregate": "algorithm.aggregate, for all task domains",
    "tasks.algorithm.clip_high": "algorithm.clip_high, for all task domains",
    "tasks.algorithm.clip_low": "algorithm.clip_low, for all task domains",
    "tasks.algorithm.correction": "algorithm.correction, for all task domains",
    "tasks.algorithm.gamma": "algorithm.gamma, for all task domains",
    "tasks.algorithm.loss": "algorithm.loss, for all task domains",
    "tasks.algorithm.overlong": "algorithm.overlong, for all task domains",
    "tasks.algorithm.reward_weight": "algorithm.reward_weight, for all task domains",
    "tasks.pin": "leave it out: rollout.affinity learned moves every task domain",
    "teacher.dialect": "leave it out: the run asks the server whether it is SGLang",
    "teacher.timeout_s": "leave it out: an answer of the teacher may take 120 s, with all retries",
    "warmup.batch": "leave it out: a step has 16 transcripts of each task domain",
    "weights.dtype": "model.dtype",
    "workers.idle_s": "leave it out: a worker is kept for 60 s, or as long as a start takes",
}
"""Key of a setting or a section → the setting that replaces it, or what to do."""
