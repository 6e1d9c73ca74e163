"""Mistakes in a user's loop that trained something else without a word: each is now right by itself, told of once, or refused."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import noiseclock as nc
from noiseclock.core.conditioning import take_rows, tensors_in
from noiseclock.core.likelihood import decoder_term
from noiseclock.core.optimizers import metric
from noiseclock.core.probes import full_precision
from small_loops import Denoiser, Probing, data


def said(run) -> list[str]:
    """The warnings that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


# --- the model ----------------------------------------------------------------------------------------------------------------------------


def test_a_scripted_model_is_probed():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, t):
            return self.layer(x) + t[:, None].to(x.dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving away from it
        model = torch.jit.script(Linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer)
    for _ in range(3):
        b = clock.draw(data(), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
    assert clock.sampler.probes == 3


# --- conditioning by a list with one item per sample --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda i: {"box": (i, i)}, lambda i: [i, "a caption"], lambda i: ("short", f"long {i}")])
def test_structures_of_one_sample_each_stay_with_it(make):
    rows = torch.tensor([3, 0, 0])
    assert take_rows([make(i) for i in range(5)], rows, 5) == [make(i) for i in (3, 0, 0)]
    assert take_rows({"tokens": [make(i) for i in range(5)]}, rows, 5)["tokens"] == [make(i) for i in (3, 0, 0)]


class Items(dict):
    """Its items are attributes too, as those of many configurations and outputs."""

    def __init__(self, items):
        super().__init__(items)
        self.__dict__ = self


@pytest.mark.parametrize("kind", [Items, lambda items: SimpleNamespace(**items)])
def test_holders_of_tensors_stay_what_they_are_and_hold_some_rows(kind):
    """They were passed on as they are, with the labels of other samples."""
    given = kind({"y": torch.arange(5), "array": np.arange(5), "name": "all"})
    found = take_rows({"c": given}, torch.tensor([3, 0]), 5)["c"]
    assert type(found) is type(given)
    assert (found.y.tolist(), found.array.tolist(), found.name) == ([3, 0], [3, 0], "all")
    assert given.y.tolist() == [0, 1, 2, 3, 4]


class Held:
    def __init__(self, **parts):
        self.__dict__ |= parts

    def tokens(self):
        return self.parts["text"]


class Called(Held):
    def __call__(self):
        return self.y


@pytest.mark.parametrize(
    ("given", "get"),
    [
        (Held(parts={"text": torch.arange(5)}), lambda c: c.parts["text"].tolist()),
        (Held(parts=[torch.arange(5), torch.zeros(5, 2)]), lambda c: c.parts[0].tolist()),
        (Called(y=torch.arange(5)), lambda c: c().tolist()),
        (Held(captions=list("01234")), lambda c: [int(text) for text in c.captions]),
        (Held(inner=Held(inner=[{"y": Held(y=np.arange(5))}])), lambda c: c.inner.inner[0]["y"].y.tolist()),
    ],
    ids=["mapping", "list", "called", "captions", "deep"],
)
def test_holders_are_looked_into_to_any_depth(given, get):
    """They were passed on as they are: as many rows as a probe's, but of other samples."""
    found = take_rows({"c": given}, torch.tensor([3, 0]), 5)["c"]
    assert (type(found), get(found), get(given)) == (type(given), [3, 0], [0, 1, 2, 3, 4])


def test_a_circle_of_references_comes_to_an_end():
    given = Held(y=torch.arange(5), name="all")
    given.itself, given.parts = given, {"of": given, "listed": [1, 2]}
    given.parts["parts"] = given.parts
    found = take_rows(given, torch.tensor([3, 0]), 5)
    assert found.itself is found.parts["of"] is found is not given
    assert (found.y.tolist(), given.y.tolist(), found.name) == ([3, 0], [0, 1, 2, 3, 4], "all")
    assert [x.tolist() for x in tensors_in(given)] == [[0, 1, 2, 3, 4]]


def test_what_is_no_data_stays_what_it_is():
    """Modules, also between tensors, functions with tensors, classes, and objects without any rows of the batch."""
    encoder, other = nn.Linear(5, 5), Held(table=torch.zeros(7), name="table")
    encoder.note = torch.arange(5)

    def function():
        return function.table

    function.table = torch.arange(5)
    kind = type("Kind", (), {"table": torch.arange(5)})
    given = Held(y=torch.arange(5), parts=[encoder, function, kind, other])
    found = take_rows(given, torch.tensor([3, 0]), 5)
    assert all(a is b for a, b in zip(found.parts, given.parts, strict=True))
    assert [*map(len, (encoder.note, function.table, kind.table, other.table))] == [5, 5, 5, 7]
    assert take_rows(encoder, torch.tensor([3, 0]), 5) is encoder


def test_a_tensor_that_stayed_on_the_host_is_indexed_there():
    """torch refuses indices on a GPU for it; fake tensors, which need no GPU, do not."""

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.__getitem__ and args[1].device.type == "cuda":
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Refusing():
        found = take_rows({"y": torch.arange(5)}, torch.tensor([3, 0], device="cuda"), 5)["y"]
    assert (found.device.type, found.shape) == ("cpu", (2,))


def test_a_tuple_of_numbers_is_of_the_samples_if_it_is_long():
    rows = torch.tensor([3, 0])
    assert take_rows((512, 512, 0, 0), rows, 4) == (512, 512, 0, 0)  # a size and a crop
    assert take_rows(tuple(range(8)), rows, 8) == (3, 0)


def test_structures_of_the_whole_batch_are_looked_into():
    first, second = take_rows([{"y": torch.arange(2)}, {"y": torch.arange(2) + 5}], torch.tensor([1]), 2)
    assert (first["y"].tolist(), second["y"].tolist()) == ([1], [6])


def test_conditioning_that_changes_before_the_probe_is_over_is_that_of_its_batch():
    """As in a loop with fixed buffers, or of a model that drops labels in place."""
    model = Denoiser(conditions=1).eval()  # otherwise the training step itself changes batch norm's statistics
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clock, labels = nc.Clock("linear", Probing()).attach(optimizer), torch.ones(16, 1)
    b = clock.draw(data(), predict=model, cond=labels)
    clock.loss(b, model(b.x_t, b.t, labels)).mean().backward()
    labels.zero_()
    optimizer.step()
    (_, before, _), (_, after, _) = clock.sampler.seen
    assert torch.equal(before, after)


# --- precision ----------------------------------------------------------------------------------------------------------------------------


def test_accelerates_autocast_around_a_model_that_was_compiled_first_is_switched_off():
    """It keeps the plain forward in the module inside, because the compiled one forwards that attribute and not `forward`."""
    net = nn.Linear(2, 2)
    compiled = torch.compile(net, backend="eager")
    compiled._original_forward = compiled.forward
    compiled.forward = torch.autocast("cpu", dtype=torch.bfloat16)(compiled.forward)
    wrapped = compiled.__dict__["forward"]
    assert "_original_forward" in net.__dict__
    assert compiled(torch.ones(1, 2)).dtype == torch.bfloat16
    with full_precision([compiled], torch.device("cpu")):
        assert compiled(torch.ones(1, 2)).dtype == torch.float32
    assert compiled.__dict__["forward"] is wrapped


# --- the loss -----------------------------------------------------------------------------------------------------------------------------


def test_a_validation_by_draw_and_loss_is_not_learned_from():
    clock = nc.Clock("linear", nc.LossSecondMoment(bins=4, refresh=1, warmup=1))
    state = str(clock.sampler.state_dict())

    def validate():
        with torch.no_grad():
            for _ in range(5):
                b = clock.draw(torch.randn(64, 2))
                assert clock.loss(b, b.x_t).shape == (64,)

    (message,) = said(validate)
    assert "is taken for a validation" in message
    assert "clock.at" in message
    assert str(clock.sampler.state_dict()) == state
    assert clock.record.by_time().drawn.sum() == 0


@pytest.mark.parametrize("sampler", [nc.VarianceOptimal(), nc.Uniform(), nc.LossSecondMoment()])
def test_a_corrected_clock_whose_loss_is_not_used_says_so(sampler):
    def train(own):
        model = Denoiser()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        clock = nc.Clock("linear", sampler, correct="importance").attach(optimizer)
        for _ in range(110):
            b = clock.draw(data(), predict=model)
            prediction = model(b.x_t, b.t)
            ((prediction - b.target).square() if own else clock.loss(b, prediction)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (message,) = said(lambda: train(own=True))
    assert "use clock.loss(b, prediction), or clock.weigh" in message or "has seen no loss" in message
    assert said(lambda: train(own=False)) == []


@pytest.mark.parametrize("sampler", [nc.VarianceOptimal(), nc.LossSecondMoment()])
def test_updates_of_another_stage_are_not_missed_by_the_clock(sampler):
    """The same optimiser trains something else first, and nothing is drawn for it."""
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", sampler).attach(optimizer)
    for _ in range(300):
        optimizer.step()
    b = clock.draw(data(), predict=model)
    clock.loss(b, model(b.x_t, b.t)).mean().backward()
    optimizer.step()
    assert clock.updates == 301  # warnings are errors here


def test_inside_a_transform_of_torch_func_the_loss_is_weighed_by_hand_and_recorded_outside():
    model, sampler = Denoiser().eval(), nc.LossSecondMoment(bins=4, refresh=1, warmup=1)
    clock = nc.Clock("linear", sampler)
    b = clock.draw(data())
    parameters = dict(model.named_parameters())

    def loss(parameters, whole):
        prediction = torch.func.functional_call(model, parameters, (b.x_t, b.t))
        if whole:
            return clock.loss(b, prediction).mean()
        errors = (prediction - b.target).square().mean(1)
        return (errors * b.weight * b.correction).mean(), errors.detach()

    with pytest.raises(ValueError, match=r"inside a transform of torch\.func nothing can be recorded; multiply the errors by b\.weight"):
        torch.func.grad(loss)(parameters, whole=True)
    found, errors = torch.func.grad(loss, has_aux=True)(parameters, whole=False)
    outside = clock.weigh(b, errors)
    expected = torch.autograd.grad(clock.loss(b, model(b.x_t, b.t)).mean(), list(model.parameters()))
    assert max((a - e).abs().max().item() for a, e in zip(found.values(), expected, strict=True)) < 1e-6
    assert outside.shape == (16,)
    assert clock.record.by_time().drawn.sum() == 32


def test_a_look_without_gradients_does_not_change_the_precision_of_probes():
    model = Denoiser()
    clock = nc.Clock("linear", nc.Adaptive(stride=100)).attach(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
    b = clock.draw(data(), predict=model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clock.loss(b, model(b.x_t, b.t))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clock.loss(b, model(b.x_t, b.t))
    assert clock.state_dict()["autocast"] == "bfloat16"


def test_negative_errors_of_ones_own_make_no_negative_density():
    clock = nc.Clock("linear", nc.LossEMA(bins=8, refresh=1, warmup=1))
    for _ in range(20):
        b = clock.draw(torch.randn(64, 2))
        clock.weigh(b, b.time.float() - 0.3)
        clock.updated()
    density = clock.plot_data().p
    assert density.min() > 0.09  # the floor
    assert density[-100:].mean() > 1.5


# --- optimisers ---------------------------------------------------------------------------------------------------------------------------


def parts(model):
    first = list(model.net[0].parameters())
    return first, [p for p in model.parameters() if all(p is not q for q in first)]


def test_an_optimiser_that_steps_rarely_is_noticed_and_an_average_is_not():
    def train(rare, average):
        model = Denoiser()
        first, rest = parts(model)
        if average:
            model.average = nn.Parameter(first[0].detach().clone(), requires_grad=False)
        attached, other = torch.optim.SGD(rest if rare else [*first, *rest], lr=0.1), torch.optim.SGD(first, lr=0.1)
        clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(attached)
        for i in range(10):
            b = clock.draw(data(), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            attached.step()
            if rare and i == 5:
                other.step()
            if average:
                model.average.data.lerp_(first[0].detach(), 0.1)
            model.zero_grad()

    (message,) = said(lambda: train(rare=True, average=False))
    assert message.startswith("2 parameters of the model, such as net.0.weight, are trained by an optimiser that is not attached")
    assert said(lambda: train(rare=False, average=True)) == []


def test_two_parts_of_predict_with_a_name_in_common_are_told_apart():
    """A trained embedding was taken for the frozen layer, because both have a `weight`."""
    model, embedding, frozen = Denoiser(conditions=1), nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
    optimizer, left_out = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, embedding))
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer)
    y = torch.ones(16, 1)

    def train(updates):
        for _ in range(updates):
            b = clock.draw(data(), predict=lambda x, t, y: model(x, t, frozen(embedding(y))), cond=y)
            clock.loss(b, model(b.x_t, b.t, frozen(embedding(y)))).mean().backward()
            for one in (optimizer, left_out):
                one.step()
                one.zero_grad()

    (message,) = said(lambda: train(3))
    assert message.startswith("2 parameters of the model, such as weight, are trained by an optimiser that is not attached")


def test_an_optimiser_that_begins_late_is_noticed():
    """As in a training that thaws a part after some time."""
    model = Denoiser()
    first, rest = parts(model)
    optimizer, late = torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(first, lr=0.1)
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer)

    def train(begins):
        for i in range(16):
            b = clock.draw(data(), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            if i >= begins:
                late.step()
            model.zero_grad()

    assert said(lambda: train(16)) == []
    assert len(said(lambda: train(0))) == 1


@pytest.mark.parametrize("named", [False, True])
def test_what_runs_beside_the_trained_model_is_evaluated_too(named):
    """Naming the model left the batch norm of an encoder in training mode, and each probe moved its statistics."""
    model, encoder = Denoiser(conditions=1), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sampler in (nc.VarianceOptimal(every=1), nc.Lookahead(every=1), nc.GradientVariance(every=1), nc.Adaptive(every=1, stride=100)):
        clock = nc.Clock("linear", sampler).attach(optimizer, **({"model": model} if named else {}))
        before = encoder[1].num_batches_tracked.item()
        for _ in range(4):
            y = torch.ones(16, 1)
            b = clock.draw(data(), predict=lambda x, t, y: model(x, t, encoder(y)), cond=y)
            clock.loss(b, model(b.x_t, b.t, encoder(y))).mean().backward()
            optimizer.step()
        assert encoder[1].num_batches_tracked.item() == before + 4
        assert encoder[1].training


def test_closures_of_an_earlier_optimiser_belong_to_the_update():
    model = Denoiser()
    first, rest = parts(model)
    newton, last = torch.optim.LBFGS(first, lr=0.1, max_iter=4), torch.optim.SGD(rest, lr=0.01)
    clock = nc.Clock("linear", Probing()).attach(newton, last)

    def closure():
        model.zero_grad()
        b = clock.draw(data(), predict=model)
        loss = clock.loss(b, model(b.x_t, b.t)).mean()
        loss.backward()
        return loss

    for _ in range(6):
        newton.step(closure)
        last.step()
    assert clock.updates == 6
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"] * 2  # every third update


def test_an_optimiser_of_copies_is_told_from_a_model_that_was_not_found():
    model = Denoiser()
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    clock = nc.Clock("linear", nc.VarianceOptimal()).attach(torch.optim.SGD(copies, lr=0.1), model=model)
    with pytest.raises(ValueError, match=r"if it trains copies of them, do not attach it, but call clock.updated\(\)"):
        clock.draw(data(), predict=model)
    first, last = (torch.optim.SGD(copies, lr=0.1) for _ in range(2))
    with pytest.raises(TypeError, match=r"got list; name several one after the other: clock.attach\(first, second\)"):
        clock.attach([first, last])
    with pytest.raises(TypeError, match="got Denoiser; the model is named by model="):
        clock.attach(first, model)


def test_a_subclass_of_adam_with_a_state_of_its_own_is_unknown():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["exp_avg_sq"] = state["exp_avg_sq"].flatten()[:1].to(torch.uint8)  # as one that compresses it

    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for kind, known in ((Own, False), (torch.optim.AdamW, True)):
        optimizer = kind([weight, unused])
        weight.grad = torch.ones(3)
        optimizer.step()
        assert not optimizer.state[unused]  # which leaves an empty state
        power, reason = metric([optimizer], [weight, unused])
        assert (reason == "") == known
        assert isinstance(power[0], torch.Tensor) == known


@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.9)])
def test_the_metric_of_sgd_is_what_one_gradient_does_in_the_end(momentum, dampening):
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.01, momentum=momentum, dampening=dampening)
    for gradient in [0.0, 1.0, *[0.0] * 400]:  # the first gradient is not dampened; after 400 steps momentum has kept 1e-18 of it
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    (power,), _ = metric([optimizer], [weight])
    assert power == pytest.approx(-float(weight.detach()), rel=1e-9)


# --- measurements -------------------------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """Predicts p + q: autograd gives both one tensor of gradients."""

    def __init__(self, two):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3)) if two else None

    def forward(self, x, t):
        return 0 * x + (self.p if self.q is None else self.p + self.q)


def test_two_parameters_with_one_gradient_have_twice_the_utility():
    """‖∇J‖² is that of one parameter, twice; here J's gradient is 2/3·(p - mean noise) for each of three numbers, up to 2 % of sampling error."""
    x0 = torch.randn(4096, 3, generator=torch.Generator().manual_seed(0))
    clock = nc.Clock("linear", "uniform")
    for two in (False, True):
        model = Sum(two)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = nc.measure.utility_over_time(clock, model, optimizer, x0, bins=1, probes=8, batch=4096).utility
        assert found == pytest.approx(0.1 * (2 if two else 1) * 3 * (2 / 3) ** 2, rel=0.02)


def test_measurements_with_several_optimisers_restore_both():
    torch.manual_seed(0)
    model = Denoiser()
    first, rest = parts(model)
    both = [torch.optim.SGD(first, lr=0.1), torch.optim.Adam(rest, lr=0.1)]
    clock = nc.Clock("linear", "uniform")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = nc.measure.interdependence(clock, model, both, data(64), updates=3, times=4, batch=16)
    alone = nc.measure.interdependence(clock, model, both[0], data(64), updates=3, times=4, batch=16)
    assert abs(found.change - alone.change).max() > 1e-6  # the second has trained too
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not both[1].state
    both[1] = torch.optim.SGD(rest, lr=0.1)  # Adam has no metric before its first update
    whole, part = (nc.measure.utility_over_time(clock, model, of, data(64), bins=1, probes=2).utility for of in (both, both[0]))
    assert abs(whole - part) > 0.1 * abs(part)


def test_the_likelihood_of_unscaled_images_is_refused():
    schedule, x0 = nc.schedule("linear"), torch.zeros(2, 1, 2, 2)
    with pytest.raises(ValueError, match=r"scaled to \[-1, 1\], but x0 reaches 255"):
        decoder_term(schedule, x0 + 255, x0)
    with pytest.raises(ValueError, match=r"the prediction has shape \(2, 1, 2, 1\), x0 \(2, 1, 2, 2\)"):
        decoder_term(schedule, x0, x0[..., :1])
    with pytest.raises(ValueError, match="levels must be at least 2, got 1"):
        decoder_term(schedule, x0, x0, levels=1)


def test_a_damaged_state_of_adaptive_is_refused_before_anything_changes():
    clock = nc.Clock(nc.schedule("linear", steps=99), nc.Adaptive(every=1))
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock.attach(optimizer)
    for _ in range(3):
        b = clock.draw(data(), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
    state = clock.state_dict()
    moments = state["sampler"]["optimizer"]
    name = next(name for name in moments if name.endswith("exp_avg"))
    policy = next(iter(state["sampler"]["policy"]))
    for part, key, value in (("optimizer", name, torch.zeros(1)), ("policy", policy, state["sampler"]["policy"][policy] * torch.nan)):
        damaged = {**state, "updates": 99, "sampler": {**state["sampler"], part: {**state["sampler"][part], key: value}}}
        with pytest.raises(ValueError, match="Adaptive: the state is damaged"):
            clock.load_state_dict(damaged)
    assert clock.updates == 3


@pytest.mark.filterwarnings("ignore:.*no optimiser is known")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_skip_that_the_device_knows_may_have_either_shape(shape):
    model = Denoiser()
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1))
    for i in range(4):
        clock.draw(data(), predict=model)
        clock.updated(skipped=torch.full(shape, i == 1))
    assert clock.updates == 3


@pytest.mark.parametrize("name", ["variance-optimal", "lookahead", "gradient-variance"])
def test_complex_parameters_are_priced_as_their_two_parts(name):
    """A complex weight a + ib is two real ones: the same draws and losses must give the same prices."""

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.view_as_complex(torch.ones(2, 2)))

        def forward(self, x, t):
            return x * self.weight.real + x.flip(1) * self.weight.imag

    class Real(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x, t):
            return x * self.weight[:, 0] + x.flip(1) * self.weight[:, 1]

    found = []
    for model in (Complex(), Real()):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        clock = nc.Clock("linear", nc.sampler(name, every=1)).attach(optimizer)
        for _ in range(12):
            b = clock.draw(data(), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(clock.sampler.variance if name == "gradient-variance" else clock.sampler.curve[0])
    # float32 differences over a step of 1e-3: about 2e-4 of the largest, twice that in squares, and Adam divides by small roots
    assert (found[0] - found[1]).abs().max() < 2e-3 * found[1].abs().max()


def test_gradients_through_reentrant_checkpoints_are_refused_in_a_sentence():
    class Recomputed(Denoiser):
        def forward(self, x, t):
            hidden = self.net[0](torch.cat([x, t[:, None].to(x) / 1000], 1))
            return torch.utils.checkpoint.checkpoint(self.net[1:], hidden, use_reentrant=True)

    model = Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.Lookahead()).attach(optimizer)
    b = clock.draw(data(), predict=model)
    clock.loss(b, model(b.x_t, b.t)).mean().backward()
    with pytest.raises(ValueError, match="reentrant checkpoints refuse; use use_reentrant=False"):
        optimizer.step()
