"""What a callable refers to: the modules in it are probed, and labels in it are told of."""

import functools
import importlib
import random
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import noiseclock as nc
from noiseclock.core.reach import LIMIT, Labels, modules_of, reached, rows_held, telling
from small_loops import Denoiser, data

LABELS = torch.arange(16.0)[:, None]
CAPTIONS = [None, *"123456789abcdef"]


class Labelled(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.labels, self.unused = model, LABELS, torch.zeros(16, 3)

    def forward(self, x, t):
        return self.model(x, t, self.labels)


class Trainer:
    """Not a module; its methods refer to what it has."""

    def __init__(self, model):
        self.model, self.labels, self.unused = model, LABELS, torch.zeros(16, 3)

    def predict(self, x, t):
        return self.inner(x, t)

    def inner(self, x, t):
        return self.model(x, t, self.labels)

    def __call__(self, x, t):
        return self.model(x, t, self.labels)


def labelled(labels, x_t, t, model):
    return model(x_t, t, labels)


def holding(how, model):
    labels, batch, nested, mine, trainer = LABELS, (data(), LABELS), {"text": {"pooled": LABELS}}, Labelled(model), Trainer(model)
    captions = CAPTIONS

    def helper(x, t):
        return model(x, t, labels)

    return {
        "labels": lambda x, t: model(x, t, labels),
        "labels (a default)": lambda x, t, labels=LABELS: model(x, t, labels),
        "labels (a global)": eval("lambda x, t: model(x, t, labels)", {"model": model, "labels": LABELS, "sample": torch.zeros(16)}),
        "labels (decorated)": torch.autocast("cpu", enabled=False)(lambda x, t: model(x, t, labels)),
        "labels (of a helper)": lambda x, t: helper(x, t),
        "labels (of a partial's function)": functools.partial(lambda m, x, t: m(x, t, labels), model),
        "argument 0": functools.partial(labelled, LABELS, model=model),
        "batch[1]": lambda x, t: model(x, t, batch[1]),
        "nested['text']['pooled']": lambda x, t: model(x, t, nested["text"]["pooled"]),
        "captions": lambda x, t: model(x, t, torch.tensor([[float(caption is None)] for caption in captions])),
        "mine.labels": lambda x, t: mine.model(x, t, mine.labels),
        "it.labels": mine,
        "it.labels (compiled)": torch.compile(mine, backend="eager"),
        "it.labels (called)": trainer,
        "self.labels": trainer.predict,
        "trainer.labels": lambda x, t: trainer(x, t),
    }[how]


HOW = [
    "labels", "labels (a default)", "labels (a global)", "labels (decorated)", "labels (of a helper)", "labels (of a partial's function)",
    "argument 0",
    "batch[1]", "nested['text']['pooled']", "captions", "mine.labels", "it.labels", "it.labels (compiled)", "it.labels (called)", "self.labels",
    "trainer.labels",
]  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_labels_and_models_are_found_wherever_a_callable_has_them(how):
    model = Denoiser(conditions=1)
    predict = holding(how, model)
    held = rows_held(predict, 16)
    assert how.partition(" (")[0] in held
    assert not [name for name in held if "unused" in name or "sample" in name]  # attributes and globals that no code names
    parameters = {id(p) for module in modules_of(predict) for p in module.parameters()}
    assert parameters >= {id(p) for p in model.parameters()}
    assert predict(torch.zeros(16, 2), torch.zeros(16)).shape == (16, 2)  # each is a model that runs


def test_a_variable_that_has_no_value_yet_is_passed_over():
    def predict(x, t, average=False):
        return ema(x, t) if average else model(x, t)

    model = Denoiser()
    assert modules_of(predict) == [model]
    ema = Denoiser()
    assert set(modules_of(predict)) == {model, ema}


def test_models_in_mappings_defaults_and_decorated_functions_are_found():
    model = Denoiser()
    models = {"unet": model}

    def decorated(function):
        def inner(*args):
            return function(*args)

        return inner

    for predict in (lambda x, t: models["unet"](x, t), lambda x, t, m=model: m(x, t), decorated(lambda x, t: model(x, t))):
        assert modules_of(predict) == [model]


class Parent:
    def predict(self, x, t):
        return self.unet(x, t)


class Child(Parent):
    """Its model is behind a property, its labels in a slot, its method calls that of its parent."""

    __slots__ = ("_unet", "labels")

    def __init__(self, unet):
        self._unet, self.labels = unet, LABELS

    @property
    def unet(self):
        return self._unet

    def predict(self, x, t):
        return super().predict(x, t) + 0 * self.labels


def test_properties_slots_and_methods_of_parents_are_followed():
    child = Child(Denoiser())
    assert modules_of(child.predict) == [child._unet]
    assert list(rows_held(child.predict, 16)) == ["self.labels"]


def test_a_package_of_the_users_own_may_be_installed(tmp_path, monkeypatch):
    """It was taken for a library, into which nobody looks."""
    package = tmp_path / "site-packages" / "mine"
    package.mkdir(parents=True)
    source = "class Trainer:\n    def predict(self, *x):\n        return self._inner(*x)\n    def _inner(self, *x):\n        return self.model(*x)\n"
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    trainer = importlib.import_module("mine").Trainer()
    trainer.model = Denoiser()
    assert modules_of(trainer.predict) == [trainer.model]
    sys.modules.pop("mine")


def test_a_mapping_that_cannot_be_read_is_passed_over():
    class Config(dict):
        def items(self):
            raise KeyError("a missing value")

    model, config = Denoiser(), Config()
    assert modules_of(lambda x, t: model(x, t) * len(config)) == [model]


def test_an_attribute_is_not_mistaken_for_a_global_of_the_same_name():
    trainer = SimpleNamespace(model=Denoiser(), labels=LABELS)
    predict = eval("lambda x, t: trainer.model(x, t)", {"trainer": trainer, "model": Denoiser(), "labels": LABELS})
    assert modules_of(predict) == [trainer.model]
    assert rows_held(predict, 16) == {}


def test_a_large_structure_costs_no_more_than_a_few_thousand_looks():
    many = [[[object() for _ in range(99)] for _ in range(99)] for _ in range(99)]
    assert len(reached(lambda x, t: many)) <= LIMIT


def test_what_only_looks_like_labels_is_never_told_of():
    """Tables of constants and parameters whose length is that of the batch by chance."""
    scale, names, table, query = torch.rand(16, 2), list("abcdefghijklmnop"), torch.rand(16, 1), nn.Parameter(torch.rand(16, 2))
    watch = Labels()
    model = Denoiser(conditions=1)
    for i in range(3):
        with torch.no_grad():
            query.add_(1)  # an optimiser trains it
        assert watch.look(lambda x, t: model(x * scale[0] + query[0], t, table[: len(x)]) + len(names), 16) == [], i


@pytest.mark.parametrize("how", ["a new tensor", "in place", "an array in place", "captions", "numbers"])
def test_labels_are_told_of_when_they_change(how):
    watch, kept = (
        Labels(),
        {"in place": torch.zeros(16), "an array in place": np.zeros(16), "captions": list("0123456789abcdef"), "numbers": [0] * 16},
    )

    def look(i):
        labels = torch.arange(16) + i if how == "a new tensor" else kept[how]
        if i:
            labels[3] = "another" if how == "captions" else 7
        return watch.look(lambda x, t: (x, labels), 16)

    assert look(0) == []
    assert look(1) == ["labels"]


def test_a_constant_that_is_made_anew_for_each_batch_is_no_label():
    watch = Labels()
    for _ in range(3):
        grid = torch.arange(16.0)
        assert watch.look(lambda x, t, grid=grid: x + grid[0], 16) == []


class Keeping(nn.Module):
    """Keeps its activations in an attribute, for another loss; and the user's labels are in one too, cleared after use."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.h, self.labels = nn.Linear(2, 8), nn.Linear(8, 2), None, None

    def forward(self, x, t):
        self.h = self.a(x)
        out = self.b(self.h)
        if self.labels is not None:
            out, self.labels = out + self.labels, None
        return out


class KeepingInAMethod(Keeping):
    def encode(self, x):
        self.h = self.a(x)

    def forward(self, x, t):
        self.encode(x)
        return self.b(self.h) + (0 if self.labels is None else self.labels)


class KeepingInTheParent(Keeping):
    def forward(self, x, t):
        return super().forward(x, t) + self.h.mean(1, keepdim=True)


class KeepingOutside:
    """No module, and its `predict` and its own call store and read in methods."""

    def __init__(self):
        self.net, self.h, self.labels = Keeping(), None, None

    def encode(self, x):
        self.h = self.net.a(x)

    def decode(self):
        return self.net.b(self.h) + (0 if self.labels is None else self.labels)

    def predict(self, x, t):
        self.encode(x)
        return self.decode()

    __call__ = predict


def keeping(how):
    """(predict, the object that keeps)"""
    owner = {"in a method": KeepingInAMethod, "in the parent": KeepingInTheParent}.get(how, KeepingOutside if "outside" in how else Keeping)()

    def around(x, t):
        return owner(x, t) + owner.h.mean(1, keepdim=True)

    def before(x, t):
        owner.h = x
        return owner.b(owner.a(owner.h)) + (0 if owner.labels is None else owner.labels)

    return {"read around it": around, "stored around it": before, "outside": owner, "outside, a method": getattr(owner, "predict", None)}.get(
        how, owner
    ), owner


KEEPING = ["in forward", "in a method", "in the parent", "read around it", "stored around it", "outside", "outside, a method"]


@pytest.mark.parametrize("how", KEEPING)
def test_what_the_code_itself_stores_is_no_label_but_what_the_user_stores_is(how):
    """A model that kept its activations was said to hold labels, and its own errors to come of them."""
    predict, owner = keeping(how)
    predict(data(), torch.zeros(16))
    assert owner.h.shape[0] == 16
    assert rows_held(predict, 16) == {}
    with pytest.raises(RuntimeError, match="mine"), telling(predict, 16):
        raise RuntimeError("mine")
    owner.labels = LABELS
    assert [name.partition(".")[2] for name in rows_held(predict, 16)] == ["labels"]
    with pytest.raises(ValueError, match=r"predict holds \w+\.labels, with"), telling(predict, 16):
        raise RuntimeError("mine")


def test_a_state_that_is_read_before_it_is_stored_is_told_of():
    """It is that of the samples before."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = torch.zeros(16, 2)

        def forward(self, x, t):
            self.h = 0.5 * self.h + x.detach()
            return self.h

    assert list(rows_held(Recurrent(), 16)) == ["it.h"]


def test_a_clock_tells_of_labels_once_and_measures_at_once():
    """They stay those of the whole batch, in its order, whatever samples are put through the model: wrong labels at best."""
    model = Denoiser(conditions=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(right):
        clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer)
        for i in range(4):
            labels = torch.full((16, 1), float(i))
            wrong = functools.partial(lambda labels, x, t: model(x, t, labels), labels)
            b = clock.draw(data(), **({"predict": model, "cond": labels} if right else {"predict": wrong}))
            clock.loss(b, model(b.x_t, b.t, labels)).mean().backward()
            optimizer.step()
        return clock

    with pytest.warns(UserWarning, match=r"predict holds argument 0, with a row for each sample .* as cond, and let") as caught:
        clock = train(right=False)
    assert len(caught) == 1
    train(right=True)  # warnings are errors here
    with pytest.warns(UserWarning, match="predict holds LABELS"):
        nc.measure.loss_over_time(clock, lambda x, t: model(x, t, LABELS), data(), times=2)


def test_a_trained_part_that_nothing_names_is_refused():
    """It would be neither put into evaluation mode nor moved, without a sign: prices of a U-Net behind an embedding were 30 times too small."""
    model, embed = Denoiser(conditions=1), nn.Linear(1, 1)
    hidden = [model.forward]  # a bound method among built-in objects: no name leads to the module's parameters

    class Hiding:
        def __getattr__(self, name):
            return hidden[0].__self__

    hider = Hiding()
    optimizer = torch.optim.SGD([*model.parameters(), *embed.parameters()], lr=1e-3)
    labels = torch.zeros(16, 1)

    def train(**named):
        clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer, **named)
        b = clock.draw(data(), predict=lambda x, t, y: hider.unet(x, t, embed(y)), cond=labels)
        clock.loss(b, model(b.x_t, b.t, embed(labels))).mean().backward()
        optimizer.step()

    with pytest.raises(
        ValueError, match=r"predict uses trained parameters that do not belong .*, 6 tensors, .* model=model\), several as model=nn.ModuleList"
    ):
        train()
    with pytest.raises(ValueError, match=r"predict uses trained parameters .*, 2 tensors"):
        train(model=model)
    train(model=nn.ModuleList([model, embed]))


def test_copies_and_rivals_in_the_same_module_are_no_unattached_models():
    """An average of the weights, and a discriminator with an optimiser of its own, do not run in predict."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.rival = Denoiser(), nn.Linear(2, 1)
            self.ema = torch.optim.swa_utils.AveragedModel(self.net)

        def predict(self, x, t):
            return self.net(x, t)

    whole = Whole()
    optimizer, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (whole.net, whole.rival))
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer)
    for _ in range(5):
        b = clock.draw(data(), predict=whole.predict)
        prediction = whole.net(b.x_t, b.t)
        (clock.loss(b, prediction).mean() + whole.rival(prediction).mean()).backward()
        optimizer.step()
        other.step()
        whole.ema.update_parameters(whole.net)
    assert clock.sampler.probes == 5  # warnings are errors here


PROBING = [nc.VarianceOptimal(every=1, samples=8), nc.Lookahead(every=1), nc.GradientVariance(every=1), nc.Adaptive(every=1, stride=50)]


@pytest.mark.parametrize("sampler", PROBING, ids=lambda sampler: type(sampler).__name__)
def test_a_model_that_fails_because_of_labels_in_predict_is_told_of_as_that(sampler):
    """Most probes call it with a part of the batch; the sizes in torch's own error say nothing of the cause."""
    torch.manual_seed(0)
    model = Denoiser(conditions=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", sampler, probe_rows=8).attach(optimizer)

    def update(labels):
        b = clock.draw(data(), predict=lambda x, t: model(x, t, labels))
        clock.loss(b, model(b.x_t, b.t, labels)).mean().backward()
        optimizer.step()

    with pytest.raises(ValueError, match="predict holds labels, with a row for each sample of the batch") as raised:
        update(torch.zeros(16, 1))
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize(("error", "held"), [(RuntimeError, None), (torch.OutOfMemoryError, LABELS), (KeyError, LABELS), (ValueError, LABELS)])
def test_other_errors_of_a_model_stay_as_they_are(error, held):
    with pytest.raises(error, match="mine"), telling(lambda x, t: (x, held), 16):
        raise error("mine")


# --- what a probe measures twice is the same ----------------------------------------------------------------------------------------------


def points(i):
    """(64, 2) others for each i."""
    return torch.randn(64, 2, generator=torch.Generator().manual_seed(i))


def prices(clock, model, predict, updates=12):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock.attach(optimizer, model=model)
    for i in range(updates):
        b = clock.draw(points(i), predict=predict)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock.sampler.curve[0]


@pytest.mark.parametrize("source", ["python", "numpy", "torch"])
def test_random_choices_of_a_model_are_the_same_in_all_passes_of_a_probe_and_leave_no_trace(source):
    """A difference between two passes with other choices, divided by the small step, was taken for a derivative 10,000 times too large. Between the
    passes before and after an update training draws too."""
    draw = {"python": random.random, "numpy": np.random.random, "torch": lambda: float(torch.rand(()))}[source]
    model = nn.Linear(2, 2)
    clock = nc.Clock("linear", nc.VarianceOptimal())
    clock.probe(data(), lambda x, t: model(x) * draw())
    time = torch.full((16,), 0.5)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    first, second = (clock._probe.losses(time) for _ in range(2))
    after = draw()
    assert torch.equal(clock._probe.losses(time), first)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert (torch.equal(first, second), after) == (True, draw())


class SelfConditioned(nn.Module):
    """Shows itself a first prediction of some samples, chosen by chance."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x, t):
        kept = (torch.rand(len(x), 1) < 0.5).float()
        return self.net(torch.cat([x, kept * self.net(torch.cat([x, torch.zeros_like(x)], 1)).detach()], 1))


def test_an_update_that_changes_nothing_has_no_reward():
    torch.manual_seed(0)
    model = SelfConditioned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clock, rewards = nc.Clock("linear", nc.Adaptive(every=1, stride=100)).attach(optimizer), []
    learn = clock.sampler._learn
    clock.sampler._learn = lambda x0, drawn, reward, *rest: (rewards.append(reward), learn(x0, drawn, reward, *rest))[1]
    for _ in range(2):
        b = clock.draw(data(), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
    assert torch.equal(torch.cat(rewards), torch.zeros(32))


class Halved(nn.Module):
    """In half precision inside, between float32 ends."""

    def __init__(self):
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Linear(256, 256), nn.SiLU())]
        self.net = nn.Sequential(nn.Linear(3, 256), nn.SiLU(), *layers, nn.Linear(256, 2))

    def forward(self, x, t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(torch.cat([x, t[:, None].to(x) / 1000], 1)).float()


class Biased(Denoiser):
    """With a bias right before its batch norm."""

    def __init__(self):
        super().__init__()
        self.net[1], self.net[2] = self.net[2], self.net[1]


class OfItsOwn(Denoiser):
    """With noise of its own generator, which no one else can set back."""

    def forward(self, x, t):
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(0)
        return super().forward(x, t) + 0.1 * torch.randn(x.shape, generator=self.generator)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("variance-optimal", kind) for kind in (Halved, Biased)),
        *((name, kind) for name in ("variance-optimal", "lookahead") for kind in (OfItsOwn, Denoiser)),
    ],
)
def test_derivatives_that_depend_on_their_step_are_told_of_once(name, kind):
    """Half precision disturbs a random direction; along a gradient, which Lookahead takes, it is exact enough. A bias before a batch norm has no
    gradient in training, but a probe's evaluation mode lets it matter."""
    torch.manual_seed(0)
    model = kind()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prices(nc.Clock("linear", nc.sampler(name, every=1)), model, model)
    said = [str(w.message) for w in caught]
    assert len(said) == (kind is not Denoiser)
    assert all("with twice the step, so they cannot be relied on" in text for text in said)


def test_a_frozen_part_in_half_precision_before_the_trained_ones_is_welcome():
    """As a text encoder is: both passes round it alike."""
    torch.manual_seed(0)
    model, encoder = Denoiser(conditions=2), nn.Linear(2, 2).bfloat16().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer)
    for i in range(12):
        tokens = points(100 + i).bfloat16()
        b = clock.draw(points(i), predict=lambda x, t, y: model(x, t, encoder(y.bfloat16()).float()), cond=tokens)
        clock.loss(b, model(b.x_t, b.t, encoder(tokens).float())).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert clock.sampler.probes == 12
