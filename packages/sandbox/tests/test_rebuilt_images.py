"""A recipe that every run builds anew (mode `scratch`)."""

from pathlib import Path

from rollweave.sandbox.references import parse_reference
from rollweave_sandbox.image_cache import ImageCache
from rollweave_sandbox.image_supply import ImageSupply


def recipe_at(folder: Path, settings: str) -> Path:
    (folder / "root").mkdir(exist_ok=True)
    file = folder / "image.toml"
    file.write_text(f'name = "a"\nbase = "root"\n{settings}')
    return file


def test_a_recipe_says_when_its_image_may_be_reused(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    modes = {
        "": "versioned",
        'lock = "lock"\n': "lock",
        "rebuild = true\n": "scratch",
        'rebuild = true\nlock = "lock"\n': "scratch",
    }
    for settings, mode in modes.items():
        recipe_at(tmp_path, settings)
        assert parse_reference("image.toml", tmp_path).mode == mode


def test_an_image_in_mode_scratch_is_of_one_run(tmp_path: Path) -> None:
    recipe_at(tmp_path, "rebuild = true\n")
    recipe = parse_reference("image.toml", tmp_path).recipe
    assert recipe is not None
    images = ImageCache(tmp_path / "cache", limit_bytes=1 << 30).images
    keys = [images.key(recipe, "scratch", tmp_path, run) for run in ("r1", "r1", "r2", "")]
    assert keys[0] == keys[1] != keys[2] is not None
    assert keys[3] is None, "no image may be reused without a run"


async def test_each_run_has_a_key_of_its_own(tmp_path: Path) -> None:
    recipe_at(tmp_path, "rebuild = true\n")
    cache = ImageCache(tmp_path / "cache", limit_bytes=1 << 30)
    keys = []
    for run in ("r1", "r1", "", ""):
        supply = ImageSupply(cache, here=tmp_path, run=run)
        keys.append(supply._resolve("image.toml").key)
        await supply.close()
    assert keys[0] == keys[1]
    assert len({*keys}) == 3
