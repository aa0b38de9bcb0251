"""A class or an option that does not exist is answered in one sentence with those that do, nearest first, at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tvr_lightning.cli import main
from tvr_lightning.config.check import check_options, nearest, sources_of
from tvr_lightning.config.recipe import data_from_recipe, from_recipe
from tvr_lightning.config.recipe_files import OptionError
from tvr_lightning.config.schema import cached_schema, keep
from tvr_lightning.methods import GARE
from tvr_lightning.option_types import hints_of

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = ["--config=tcmgc", "--config=fixture"]
MODEL, ENCODER = "model.init_args", "model.init_args.encoder"
WRONG = [
    ("trainer.max_epoch", "3", "trainer.max_epoch: there is no such option. Available: max_epochs, "),
    ("model", "Gare", "model.class_path is Gare, which does not exist. Available: GARE, "),
    (ENCODER, "ClipEncodr", f"{ENCODER}.class_path is ClipEncodr, which does not exist. Available: ClipEncoder, "),
    (f"{MODEL}.contrast", "NLC", f"{MODEL}.contrast.class_path is NLC, which does not exist. Available: NCL"),
    ("model.class_path", "nowhere.Mine", "nowhere cannot be imported"),
    ("model.class_path", "tvr_lightning.methods.Absent", "tvr_lightning.methods has no Absent. Available: "),
    (f"{MODEL}.gahter", "local", f"{MODEL}.gahter: TCMGC has no option gahter. Available: gather, "),
    (f"{MODEL}.answers", "9", "TCMGC has no option answers (VideoQuestionAnswering has one). Available: "),
    (f"{MODEL}.optimizer.learning_rate", "1", f"{MODEL}.optimizer.learning_rate: there is no such option. "),
    (f"{MODEL}.evaluation.normalization", "DualSoft", "normalization.class_path is DualSoft, which does not exist"),
    (f"{ENCODER}.init_args.widht", "64", "TinyClipEncoder has no option widht. Available: width, "),
    ("data.init_args.fraems", "3", "data.init_args.fraems: MSRVTT has no option fraems. Available: frames, "),
    ("data.init_args.frames", "many", "data.init_args.frames is 'many'; expected a whole number"),
    (f"{MODEL}.gather", "globe", f"{MODEL}.gather is 'globe'; expected global, local, own-slice, or none"),
    (f"{MODEL}.tcmgc.contrasts", "[word_word]", f"{MODEL}.tcmgc.contrasts is 'word_word'; expected video_sentence, "),
    ("trainer.max_epoks", "3", "trainer.max_epoks: there is no such option. Available: max_epochs, "),
    ("workers", "4", "fit has no option --workers. Did you mean --data.init_args.num_workers?"),
    (f"{MODEL}.tcmgc.keep_rate", "3", f"{MODEL}.tcmgc.keep_rate is 3; expected a number (above 0 and at most 1)"),
    ("data.init_args.batch_size", "0", "data.init_args.batch_size is 0; expected a whole number (at least 1)"),
    ("data.init_args.max_train_videos", "0", "is 0; expected a whole number (at least 1) or null"),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of these tests, with the schema in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert cached_schema() is None
        with pytest.raises(OptionError, match="has no option gahter"):
            from_recipe(["tcmgc"], ["--model.init_args.gahter=local"])
        assert cached_schema() is not None
        yield


@pytest.mark.parametrize(("option", "value", "said"), WRONG)
def test_what_does_not_exist_is_named_with_what_does(option, value, said, capsys):
    assert main(["fit", *RECIPE, f"--{option}={value}"]) == 2
    found = capsys.readouterr().err
    assert len(found.splitlines()) == 1, found
    assert found.startswith("tvr: ")
    assert said in found


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            f"{MODEL}.tcmgc.contrasts=[frame_word]",
            "decorrelation needs two contrasts, since the variance of frame_word",
        ),
        (f"{MODEL}.evaluation.audit=2", "evaluation.audit must be at least 4, or 0 for no audit, not 2"),
    ],
)
def test_what_options_refuse_is_one_sentence(option, said, msrvtt, capsys):
    assert main(["fit", *RECIPE, f"--data.init_args.root={msrvtt}", f"--{option}"]) == 1
    (found,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tvr: ")]
    assert found.startswith(f"tvr: {said}")
    assert "Namespace" not in found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: {class_path: GAIDD}", "model.class_path is GAIDD, which does not exist. Available: GAID, "),
        ("model: {init_args: {encoder: {init_args: {freez: all}}}}", "TinyClipEncoder has no option freez. Available:"),
        ("model: {class_path: XPool, init_args: {answers: 9}}", "no option answers (VideoQuestionAnswering has one)"),
        ("data: {init_args: {holdut: 3}}", "MSRVTT has no option holdut. Available: holdout, "),
        ("modle: {class_path: GARE}", "there is no option modle. Available: model, "),
    ],
)
def test_a_recipe_is_named_with_what_is_wrong_in_it(content, said, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(content)
    with pytest.raises(OptionError) as refused:
        from_recipe(["tcmgc", "fixture", recipe])
    assert str(refused.value).startswith(f"--config {recipe}: ")
    assert said in str(refused.value)


def test_options_of_data_alone_are_checked_too(tmp_path):
    recipe = tmp_path / "data.yaml"
    recipe.write_text("data: {class_path: LSMDC, init_args: {bach_size: 8}}")
    with pytest.raises(OptionError, match=r"data\.yaml: data\.init_args\.bach_size: LSMDC has no option bach_size"):
        data_from_recipe([recipe])
    with pytest.raises(OptionError, match=r"data\.init_args\.fraems: LSMDC has no option"):
        data_from_recipe(["data/lsmdc"], ["--data.init_args.fraems=3"])


def test_the_nearest_come_first_and_the_rest_is_counted():
    names = [f"option_{number}" for number in range(20)]
    assert nearest("option_17x", names).startswith("option_17, ")
    assert nearest("option_17x", names).endswith(" and 8 more")


def test_options_that_are_handed_on_to_a_base_count():
    class Mine(GARE):
        def __init__(self, own: int = 1, **options) -> None:
            super().__init__(**options)

    assert {"own", "encoder", "words", "contrast"} < set(hints_of(Mine))


def test_recipes_of_this_project_and_classes_of_other_packages_are_allowed():
    schema = cached_schema()
    found = [path for path in sorted(RECIPES.rglob("*.yaml")) if path.parent.name != "tables"]
    assert len(found) > 60
    for path in found:
        check_options(sources_of([path], []), schema)
    own = ["--model.class_path=decimal.Decimal", "--model.init_args.anything=3", "--trainer.strategy=ddp"]
    check_options(sources_of([], own), schema)


def test_a_wrong_option_is_refused_before_torch_is_imported():
    gather, batch = "--model.init_args.gahter=local", "--data.init_args.batch_size=0"
    commands = [["fit", *RECIPE, gather], ["profile", "--config", "gare", gather], ["fit", *RECIPE, batch]]
    program = (
        "import json, sys\nfrom tvr_lightning.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n    assert main(words) == 2\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    command = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(RECIPES.parent)})
    assert done.returncode == 0, done.stderr
    first, second, third = done.stderr.splitlines()
    assert first.startswith("tvr: model.init_args.gahter: ")
    assert second.startswith("tvr: model.init_args.gahter: ")
    assert third == "tvr: data.init_args.batch_size is 0; expected a whole number (at least 1)"


def test_the_schema_is_printed_for_editors(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == cached_schema()
    tcmgc = next(kind for kind in schema["$defs"]["LightningModule"]["anyOf"] if "methods.TCMGC" in str(kind))
    assert tcmgc["properties"]["class_path"] == {"enum": ["TCMGC", "tvr_lightning.methods.TCMGC"]}
    rate = schema["$defs"]["TCMGCOptions"]["properties"]["keep_rate"]
    assert (rate["type"], rate["exclusiveMinimum"], rate["maximum"]) == ("number", 0, 1)
    assert rate["description"]


def test_a_cache_that_cannot_be_written_has_no_home_or_is_of_other_sources_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OptionError, match="has no option gahter"):
        from_recipe(["tcmgc"], ["--model.init_args.gahter=local"])
    assert cached_schema() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OptionError):
        from_recipe(["tcmgc"], ["--model.init_args.gahter=local"])
    (file,) = (tmp_path / "tvr-lightning").iterdir()
    assert cached_schema() is not None
    file.write_text(file.read_text().replace('"sources": "', '"sources": "other'))
    assert cached_schema() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    keep({})
    assert cached_schema() is None


def no_home(path):
    raise RuntimeError("Could not determine home directory.")
