"""Recipes are found by name, and errors about them are one line."""

import json
from pathlib import Path

import pytest

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe, data_from_recipe
from tvr_lightning.config.recipe_files import RECIPES, find_recipe, read_recipe, split_options

COMMANDS = (
    ["data", "check"], ["data", "stats"], ["extract"], ["caption"], ["audit"], ["profile"], ["fit"], ["test"],
)  # fmt: skip


def error_of(words, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tvr: ")
    return line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_recipe_that_is_missing_or_would_run_code_is_refused(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parent if command == ["fit"] else tmp_path)
    in_checkout = Path("recipes").is_dir()
    for name in ("tcmcg", "recipes/tcmcg.yaml", "nowhere/tcmgc.yml"):
        error = error_of([*command, "--config", name], capsys)
        near = "recipes/tcmgc.yaml" if in_checkout and name.startswith("recipes/") else "tcmgc"
        assert f"--config {name}: no such file; did you mean {near}?" in error
    recipe = tmp_path / "evil.yaml"
    recipe.write_text(f"data: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    error = error_of([*command, f"--config={recipe}"], capsys)
    assert str(recipe) in error
    assert "python/object/apply:os.mkdir" in error
    assert not (tmp_path / "ran").exists()


def test_a_name_without_a_file_in_this_folder_is_a_recipe_of_this_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tcmgc", "tcmgc.yaml", "recipes/tcmgc.yaml"):
        assert find_recipe(name) == RECIPES / "tcmgc.yaml"
    assert find_recipe("data/didemo") == RECIPES / "data" / "didemo.yaml"
    (tmp_path / "tcmgc").mkdir()
    assert find_recipe("tcmgc") == RECIPES / "tcmgc.yaml"
    (tmp_path / "tcmgc.yaml").write_text("trainer: {max_epochs: 1}\n")
    assert read_recipe("tcmgc.yaml") == {"trainer": {"max_epochs": 1}}
    named = ["--config", "clip4clip", "--a=1", "--config=data/didemo", "--config", "{trainer: {max_epochs: 1}}"]
    assert split_options(named) == [
        ("config", "clip4clip"), ("a", "1"), ("config", "data/didemo"), ("config", "{trainer: {max_epochs: 1}}"),
    ]  # fmt: skip
    data = data_from_recipe(["clip4clip", "data/didemo", "fixture"], ["--data.init_args.root=2024"])
    assert (data.title, str(data.root)) == ("DiDeMo", "2024")  # a folder whose name is a number


def test_tables_are_found_from_any_folder_and_unknown_ones_are_named_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVR_DATA", raising=False)
    assert main(["reproduce", "gare-1", "--only", "gare", "--dry_run", "--overlay", "hardware/cpu"]) == 0
    assert "gare-1/gare" in capsys.readouterr().out
    unknown = error_of(["reproduce", "gare-99"], capsys)
    assert "There is no table 'gare-99'. The most similar names are gare-" in unknown
    assert unknown.count("gare-") == 4, "the name and three similar ones"
    assert "/tables` lists all." in unknown
    assert "names are tc-mgc-1a, " in error_of(["reproduce", "tcmgc-1a"], capsys)


@pytest.mark.parametrize("content", ["- a\n- list\n", "just words", "a: [1", "# nothing", "a: " + 5_000 * "["], ids=len)
def test_a_file_that_is_not_a_recipe_is_named(content, tmp_path, capsys):
    (tmp_path / "list.yaml").write_text(content)
    words = ["data", "check", f"--config={tmp_path / 'list.yaml'}"]
    assert str(tmp_path / "list.yaml") in error_of(words, capsys)


@pytest.mark.parametrize("command", [["data", "stats"], ["audit"]])
def test_the_error_about_missing_data_suggests_the_given_recipe_on_synthetic_data(command, tmp_path, capsys):
    here = f"--config={{data: {{class_path: MSRVTT, init_args: {{root: {tmp_path}}}}}}}"
    assert main([*command, f"--config={RECIPES / 'tcmgc.yaml'}", here]) == 2
    suggested = f"tvr {' '.join(command)} --config {RECIPES / 'tcmgc.yaml'} --config recipes/fixture.yaml"
    assert suggested in capsys.readouterr().err


def test_null_weights_stay_null_on_the_command_line_and_in_recipes():
    encoders = {"encoder": "ClipEncoder", "audio_encoder": "WhisperEncoder"}
    arguments = [[f"--model.init_args.{part}={kind}" for part, kind in encoders.items()] for _ in range(3)]
    arguments[0] += [f"--model.init_args.{part}.init_args.weights=null" for part in encoders]
    for part in encoders:
        arguments[1] += [f"--model.init_args.{part}.init_args.weights", "null"]
    null = {part: {"class_path": kind, "init_args": {"weights": None}} for part, kind in encoders.items()}
    arguments[2].append(f"--config={json.dumps({'model': {'init_args': null}})}")
    for words in arguments:
        model = Recipe.parse(["gaid"], words).config.model.init_args
        assert [model[part].init_args.weights for part in encoders] == [None, None]
