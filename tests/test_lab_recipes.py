"""The table of recipes: what the papers print, that every one can be built, and that mistakes are named."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings as how, strategies as st

from noiseclock.core.adaptive import Adaptive
from noiseclock.core.loss_based import LossSecondMoment
from noiseclock.core.names import SAMPLERS, SHORT
from noiseclock.core.samplers import Sampler
from noiseclock.core.schedules import Schedule
from noiseclock.core.uncertainty import Uncertainty
from noiseclock.core.weightings import MinSNR, Weighting
from noiseclock.core.wrappers import Mixture, Shifted
from noiseclock.lab import wording
from noiseclock.lab.built import network
from noiseclock.lab.errors import Mistake
from noiseclock.lab.models import count
from noiseclock.lab.recipes import RECIPES, Recipe, recipe
from noiseclock.lab.trained import recipe_of

# --- what the papers print ----------------------------------------------------------------------------------------------------------------


def values(name: str, *of: str) -> tuple:
    settings = RECIPES[name].recipe.settings()
    return tuple(settings[field] for field in of)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "quadratic"])
def test_cifar10_is_table_7_of_the_adaptive_paper(schedule):
    name = f"cifar10-{schedule}"
    assert values(name, "data", "schedule", "steps", "objective", "flip") == ("cifar10", schedule, 1000, "eps", True)
    assert values(name, "channels", "multipliers", "blocks", "attention", "dropout") == (128, (1, 2, 2, 2), 2, (16,), 0.1)
    assert values(name, "optimizer", "lr", "batch", "warmup", "clip", "ema") == ("adam", 2e-4, 128, 5000, 1.0, 0.9999)
    assert values(name, "variance", "solver", "solver_steps") == ("fixed-large", "ddpm", 1000)
    assert values(name, "updates") == (2040 * 50_000 / 128,)  # 2040 epochs


def test_cifar10_sprint_is_a_narrow_model_for_20k_steps():
    assert values("cifar10-sprint", "data", "channels", "updates", "lr") == ("cifar10", 64, 20_000, 4e-4)


def test_edm_is_as_released_but_for_the_network():
    name = "cifar10-edm"
    assert values(name, "optimizer", "lr", "betas", "weight_decay", "batch", "clip") == ("adam", 1e-3, (0.9, 0.999), 0.0, 512, 0.0)
    assert values(name, "schedule", "objective", "sampler", "base") == ("edm", "edm", "log-normal", "log-normal")
    assert values(name, "dropout", "solver", "solver_steps") == (0.13, "heun", 18)
    warmup, updates, ema = values(name, "warmup", "updates", "ema")
    assert (warmup, updates) == pytest.approx((10e6 / 512, 200e6 / 512), rel=0.03)  # images
    assert ema == pytest.approx(0.5 ** (512 / 500e3), abs=5e-5)  # half of it is forgotten after 500,000 images


def test_celebahq_is_table_8_of_the_adaptive_paper():
    name = "celebahq-ldm"
    assert values(name, "data", "size") == ("latents:data/celebahq-latents", None)
    assert values(name, "channels", "multipliers", "blocks", "dropout") == (224, (1, 2, 3, 4), 2, 0.0)
    assert values(name, "optimizer", "betas", "lr", "batch", "ema") == ("adamw", (0.9, 0.999), 1.92e-4, 24, 0.9999)
    assert values(name, "solver", "solver_steps") == ("ddim", 200)
    assert values(name, "clip", "weight_decay") == (0.0, 0.01)  # LDM's own
    assert values(name, "updates") == (300 * 30_000 / 24,)  # 300 epochs of CelebA-HQ's 30,000 images
    betas = recipe_of(RECIPES[name].recipe.settings()).clock().schedule.betas
    assert (betas[0], betas[-1]) == pytest.approx((0.0015, 0.0195), rel=1e-12)  # LDM's own


def test_imagenet_is_table_9_of_the_adaptive_paper():
    name = "imagenet-uvit"
    width, head = values(name, "channels", "head_channels")
    assert (width, width // head) == (1152, 16)
    # U-ViT-H, whose depth is 28; the table prints 12
    assert values(name, "model", "blocks", "patch", "dropout") == ("uvit", 28, 2, 0.0)
    assert "prints depth 12 where U-ViT-H has 28" in RECIPES[name].about
    assert values(name, "optimizer", "betas", "lr", "batch", "ema") == ("adamw", (0.99, 0.99), 2e-4, 256, 0.9999)
    assert values(name, "schedule", "updates", "solver", "solver_steps") == ("cosine", 2_100_000, "heun", 50)
    # as U-ViT released it
    assert values(name, "flip", "conditional", "drop_labels", "weight_decay", "warmup", "clip") == (True, True, 0.1, 0.03, 5000, 0.0)


def test_coco_is_as_u_vit_released_it():
    name = "coco-t2i"
    assert values(name, "model", "channels", "blocks", "head_channels") == ("uvit", 512, 12, 64)  # 8 heads
    assert values(name, "data", "patch") == ("latents:data/coco-latents", 2)
    assert values(name, "optimizer", "lr", "betas", "weight_decay", "warmup", "batch") == ("adamw", 2e-4, (0.9, 0.9), 0.03, 5000, 256)
    assert values(name, "conditional", "drop_labels", "updates", "ema", "clip") == (True, 0.1, 1_000_000, 0.9999, 0.0)


@pytest.mark.parametrize("name", ["ffhq-dit", "metfaces-dit", "imagenet-dit"])
def test_dit_is_as_in_speed(name):
    assert values(name, "model", "channels", "blocks", "patch") == ("dit", 1152, 28, 2)  # DiT-XL/2
    assert values(name, "optimizer", "lr", "weight_decay", "clip", "batch", "flip") == ("adamw", 1e-4, 0.0, 0.0, 256, True)
    assert values(name, "schedule", "steps", "ema", "solver", "solver_steps") == ("linear", 1000, 0.9999, "ddpm", 250)
    classes = name == "imagenet-dit"
    assert values(name, "conditional", "drop_labels", "updates") == (classes, 0.1, 400_000 if classes else 50_000)


# --- every recipe works -------------------------------------------------------------------------------------------------------------------

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32), "latents": (4, 32, 32), "latents:data/celebahq-latents": (3, 64, 64)}
CLIP = SimpleNamespace(empty=torch.zeros(77, 768))  # captions as ViT-L/14 embeds them
MILLIONS = {
    "digits": 0.7, "mnist": 1.6, "cifar10-linear": 35.7, "cifar10-cosine": 35.7, "cifar10-quadratic": 35.7, "cifar10-sprint": 9.0,
    "cifar10-edm": 35.7, "cifar10-flow": 35.7,
    "ffhq-dit": 674, "metfaces-dit": 674, "celebahq-ldm": 274, "imagenet-uvit": 501, "imagenet-dit": 675, "coco-t2i": 45,
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_parameters_that_it_says(name):
    entry = RECIPES[name]
    shape = SHAPES.get(entry.recipe.data) or SHAPES[entry.recipe.data.partition(":")[0]]
    told = name == "coco-t2i"
    data = SimpleNamespace(shape=shape, classes=None if told else 1000, texts=CLIP if told else None, name="")
    with torch.device("meta"):
        parameters = count(network(entry.recipe, data, entry.recipe.clock())) / 1e6
    stated = MILLIONS[name]
    assert entry.cost.startswith(f"{stated:g} M parameters") or entry.cost.startswith(f"{stated:.1f} M parameters")
    assert round(parameters, 0 if stated > 40 else 1) == stated


def test_35_7_million_is_ddpm_to_the_parameter():
    # google/ddpm-cifar10-32, as everybody counts it
    data = SimpleNamespace(shape=(3, 32, 32), classes=None, texts=None, name="")
    with torch.device("meta"):
        assert count(network(recipe("cifar10-linear"), data, recipe("cifar10-linear").clock())) == 35_746_307


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_back_from_its_json(name):
    settings = RECIPES[name].recipe
    assert recipe_of(json.loads(json.dumps(settings.settings()))) == settings
    assert str(settings.clock()) == str(recipe_of(settings.settings()).clock())


def test_all_are_found_and_say_what_they_need():
    for name, entry in RECIPES.items():
        assert recipe(name) is entry.recipe
        assert entry.about
        assert entry.needs
        assert entry.cost
    with pytest.raises(Mistake, match="unknown recipe 'digit'"):
        recipe("digit")


def test_a_config_of_another_version_is_named():
    with pytest.raises(Mistake, match="does not know: colour, taste"):
        recipe_of({"lr": 1e-3, "colour": 1, "taste": 2})


# --- mistakes -----------------------------------------------------------------------------------------------------------------------------

WRONG = {
    "lr must be positive, got -1": {"lr": -1},
    "lr must be finite, got nan": {"lr": float("nan")},
    "lr must be finite, got inf": {"lr": float("inf")},
    "clip must be finite, got nan": {"clip": float("nan")},
    "weight_decay must be finite, got inf": {"weight_decay": float("inf")},
    "seed must be less than 2**32, got 99999999999": {"seed": 99999999999},
    "betas must lie in [0, 1), got (0.9, 1.0)": {"betas": (0.9, 1.0)},
    "batch must be at least 1, got 0": {"batch": 0},
    "a batch of 10 cannot be split into 3 equal micro-batches": {"batch": 10, "accumulate": 3},
    "ema must lie in [0, 1), got 1.0": {"ema": 1.0},
    "drop_labels must lie in [0, 1), got -0.1": {"drop_labels": -0.1},
    "warmup must not be negative, got -5": {"warmup": -5},
    "unknown objective 'epsilon'": {"objective": "epsilon"},
    "objective 'eps' takes no option 'sigma_data'; allowed: none": {"objective": "eps:sigma_data=1"},
    "sigma_data must be positive, got -1": {"objective": "edm:sigma_data=-1"},
    "unknown optimizer 'adam2' (did you mean adam?)": {"optimizer": "adam2"},
    "unknown precision 'fp16' (did you mean bf16?)": {"precision": "fp16"},
    "unknown solver 'ddin' (did you mean ddim?)": {"solver": "ddin"},
    "unknown sampler 'adaptve' (did you mean adaptive?)": {"sampler": "adaptve"},
    "unknown schedule 'betas'": {"schedule": "betas"},
    "sampler 'speed:q=3': sampler 'speed' takes no option 'q'; allowed: k, tau, variant, schedule": {"sampler": "speed:q=3"},
    "'speed:k': 'k' is not option=value": {"sampler": "speed:k"},
    "'speed:k=3,k=5': k is given twice": {"sampler": "speed:k=3,k=5"},
    "sampler 'shifted:k=3': sampler 'shifted' needs sampler": {"sampler": "shifted:k=3"},
    "the schedule 'flow' is continuous and has no steps; set steps to None": {"schedule": "flow"},
    "steps is a setting of its own": {"schedule": "linear:steps=10"},
    "solver_steps can be at most 10, the steps that there are, got 50": {"steps": 10},
    "take the objective v, x0 or flow": {"schedule": "linear:zero_terminal_snr=true"},
    "correction": {"correct": "perhaps"},
    "importance correction needs a sampler that covers the base": {"sampler": "truncated:sampler=uniform,lo=0.5", "correct": "importance"},
}


@pytest.mark.parametrize(("message", "changes"), WRONG.items(), ids=WRONG)
def test_a_wrong_setting_is_one_sentence(message, changes):
    with pytest.raises(Mistake) as mistake:
        replace(recipe("digits"), **changes)
    assert message in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_an_unknown_recipe_shows_the_nearest():
    with pytest.raises(Mistake, match=r"unknown recipe 'digit' \(did you mean digits\?\); known: digits, mnist, cifar10-linear"):
        recipe("digit")


# --- words --------------------------------------------------------------------------------------------------------------------------------


def test_words_make_what_they_say():
    inner = wording.sampler("shifted:sampler=logit-normal,k=2")
    assert isinstance(inner, Shifted)
    assert inner.k == 2.0
    assert wording.weighting("min-snr") == MinSNR()
    learned = wording.weighting("uncertainty:weighting=min-snr")
    assert isinstance(learned, Uncertainty)
    assert learned.weighting == MinSNR()
    assert wording.schedule("scaled-linear:beta_end=0.03", 500).betas[-1] == pytest.approx(0.03, rel=1e-12)
    assert wording.schedule("linear", None).steps == 1000
    assert wording.schedule("edm:sigma_max=10", None).steps is None


def test_shorthands_mean_the_same_wherever_a_sampler_is_written():
    assert wording.sampler("lsm:bins=8") == LossSecondMoment(bins=8)
    assert wording.sampler("mixture:sampler=lsm") == Mixture(LossSecondMoment())
    assert repr(wording.sampler("adaptive.paper:floor=0.01")) == repr(Adaptive.paper(floor=0.01))
    with pytest.raises(Mistake, match=r"unknown sampler 'lsn' \(did you mean lsm\?\); known: .*, lsm, adaptive.paper, "):
        wording.sampler("lsn")


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_of_the_library_can_be_named(name):
    inner = ":sampler=logit-normal" if name in ("shifted", "truncated", "mixture", "annealed") else ""
    assert isinstance(replace(recipe("digits"), sampler=name + inner).clock().sampler, SAMPLERS[name])


known = [*SAMPLERS, *SHORT, *wording._WEIGHTINGS, *wording._SCHEDULES]
options = ["k", "tau", "variant", "sampler", "other", "weighting", "gamma", "normalize", "floor", "every", "bins", "lo", "hi", "std"]
options += ["schedule"]
numbers = ["0", "-1", "3", "0.5", "nan", "inf", "1e400", "true", "auto", "uniform", "min-snr", "speed", "", "a=b", "é"]


@how(max_examples=300, deadline=None)
@given(
    st.sampled_from(known) | st.text(max_size=5),
    st.lists(st.tuples(st.sampled_from(options), st.sampled_from(numbers)), max_size=2),
    st.sampled_from([":", "", "::"]),
)
def test_any_words_make_a_part_or_a_mistake(name, given_options, colon):
    text = name + colon + ",".join(f"{option}={value}" for option, value in given_options)
    for kind, make in (
        (Sampler, wording.sampler), (Weighting, wording.weighting), (Schedule, lambda words: wording.schedule(words, None)),
    ):  # fmt: skip
        try:
            assert isinstance(make(text), kind)
        except Mistake as mistake:
            assert "\n" not in str(mistake)  # noqa: PT017


def test_settings_that_an_earlier_version_wrote_are_read_under_their_new_names():
    old = {**Recipe(pretrained="runs/other").settings(), "start": "runs/first"}
    del old["pretrained"], old["base"]  # renamed since, and new since
    assert recipe_of(old) == Recipe(pretrained="runs/first")
    with pytest.raises(Mistake, match="does not know: colour"):
        recipe_of({**old, "colour": 1})
