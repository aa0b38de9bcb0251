"""Classes, options, and values that do not exist are refused with those that do, nearest first, before torch loads."""

import json
from pathlib import Path

import pytest

from tvr_lightning.cli import main
from tvr_lightning.config.check import merge, nearest, sources_of
from tvr_lightning.config.recipe import data_from_recipe, from_recipe
from tvr_lightning.config.schema import cached_schema, keep
from tvr_lightning.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = ["--config=tcmgc", "--config=fixture"]
MODEL, ENCODER = "model.init_args", "model.init_args.encoder"
WRONG = [
    ("trainer.max_epoch", "3", "trainer.max_epoch: there is no such option. Did you mean max_epochs?"),
    ("model", "Gare", "model.class_path is Gare, which does not exist. Did you mean GARE?"),
    (ENCODER, "ClipEncodr", f"{ENCODER}.class_path is ClipEncodr, which does not exist. Did you mean ClipEncoder?"),
    ("model.class_path", "nowhere.Mine", "nowhere cannot be imported"),
    ("model.class_path", "tvr_lightning.methods.Absent", "tvr_lightning.methods has no Absent. Available: "),
    (f"{MODEL}.answers", "9", "TCMGC has no option answers (VideoQuestionAnswering has one). Available: "),
    (f"{MODEL}.optimizer.learning_rate", "1", f"{MODEL}.optimizer.learning_rate: there is no such option. "),
    (f"{MODEL}.evaluation.normalization", "DualSoft", "normalization.class_path is DualSoft, which does not exist"),
    ("data.init_args.fraems", "3", "data.init_args.fraems: MSRVTT has no option fraems. Did you mean frames?"),
    ("data.init_args.frames", "many", "data.init_args.frames is 'many'; expected a whole number"),
    (f"{MODEL}.gather", "globe", f"{MODEL}.gather is 'globe'; expected global, local, own-slice, or none"),
    (f"{MODEL}.tcmgc.contrasts", "[word_word]", f"{MODEL}.tcmgc.contrasts is 'word_word'; expected video_sentence, "),
    ("workers", "4", "fit has no option --workers. Did you mean --data.init_args.num_workers?"),
    (f"{MODEL}.tcmgc.keep_rate", "3", f"{MODEL}.tcmgc.keep_rate is 3; expected a number (above 0 and at most 1)"),
    ("data.init_args.batch_size", "[1", "data.init_args.batch_size is '[1'; expected a whole number (at least 1)"),
    ("data.init_args.max_train_videos", "0", "is 0; expected a whole number (at least 1) or null"),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of these tests, with the schema in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert cached_schema() is None
        with pytest.raises(UserError, match="has no option gahter"):
            from_recipe(["tcmgc"], ["--model.init_args.gahter=local"])
        assert cached_schema() is not None
        yield


@pytest.mark.parametrize(("option", "value", "message"), WRONG)
def test_an_unknown_option_or_class_is_named_with_the_available_ones(option, value, message, capsys):
    assert main(["fit", *RECIPE, f"--{option}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tvr: ")
    assert message in line


@pytest.mark.parametrize("value", ["[2026] videos", "@home/videos", "*.mp4", "a: b: c", "2026-13-01", "!!python/x y"])
def test_a_text_on_the_command_line_need_not_be_yaml(value):
    assert data_from_recipe(["data/msrvtt"], [f"--data.init_args.root={value}"]).root == value


def test_an_error_in_a_constructor_is_printed_in_one_line(msrvtt, capsys):
    assert main(["fit", *RECIPE, f"--data.init_args.root={msrvtt}", f"--{MODEL}.evaluation.recall=[5, 1]"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tvr: ")]
    assert line.startswith("tvr: evaluation.recall is [5, 1]; it must be ascending numbers of at least 1")
    assert "Namespace" not in line


@pytest.mark.parametrize(
    ("parse", "content", "message"),
    [
        (from_recipe, "model: {class_path: GAIDD}",
         "model.class_path is GAIDD, which does not exist. Did you mean GAID?"),
        (from_recipe, "model: {init_args: {encoder: {init_args: {freez: all}}}}",
         "TinyClipEncoder has no option freez. Available:"),
        (from_recipe, "modle: {class_path: GARE}", "there is no option modle. Did you mean model?"),
        (data_from_recipe, "data: {class_path: LSMDC, init_args: {bach_size: 8}}",
         "data.init_args.bach_size: LSMDC has no option bach_size"),
    ],
)  # fmt: skip
def test_errors_in_a_recipe_name_its_file(parse, content, message, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(content)
    with pytest.raises(UserError) as refused:
        parse(["tcmgc", "fixture", recipe])
    assert str(refused.value).startswith(f"--config {recipe}: ")
    assert message in str(refused.value)


def test_the_nearest_names_come_first_and_the_rest_are_counted():
    names = [f"option_{number}" for number in range(20)]
    assert nearest("17", names).startswith("Available: option_17, ")
    assert nearest("17", names).endswith(" and 8 more.")


def test_recipes_of_this_project_and_classes_of_other_packages_are_allowed():
    schema = cached_schema()
    found = [path for path in sorted(RECIPES.rglob("*.yaml")) if path.parent.name != "tables"]
    assert len(found) > 60
    for path in found:
        merge(sources_of([path], []), schema)
    own = ["--model.class_path=decimal.Decimal", "--model.init_args.anything=3", "--trainer.strategy=ddp"]
    merge(sources_of([], own), schema)


def test_the_schema_is_printed_for_editors(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == cached_schema()
    tcmgc = next(kind for kind in schema["$defs"]["LightningModule"]["anyOf"] if "methods.TCMGC" in str(kind))
    assert tcmgc["properties"]["class_path"] == {"enum": ["TCMGC", "tvr_lightning.methods.TCMGC"]}
    rate = schema["$defs"]["TCMGCOptions"]["properties"]["keep_rate"]
    assert (rate["type"], rate["exclusiveMinimum"], rate["maximum"]) == ("number", 0, 1)
    assert rate["description"]


def no_home(path):
    raise RuntimeError("Could not determine home directory.")


def test_a_cache_that_cannot_be_written_or_is_out_of_date_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="has no option gahter"):
        from_recipe(["tcmgc"], ["--model.init_args.gahter=local"])
    assert cached_schema() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError):
        from_recipe(["tcmgc"], ["--model.init_args.gahter=local"])
    (file,) = (tmp_path / "tvr-lightning").iterdir()
    assert cached_schema() is not None
    file.write_text(file.read_text().replace('"sources": "', '"sources": "other'))
    assert cached_schema() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    keep({})
    assert cached_schema() is None
