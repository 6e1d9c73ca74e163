"""Noiseclock decides which noise level a diffusion model trains on next, and shows whether that choice pays.

clock = nc.Clock("linear", nc.SpeeD(), nc.MinSNR(5), "eps").attach(optimizer)
for x0 in loader:
    b = clock.draw(x0)
    loss = clock.loss(b, model(b.x_t, b.t)).mean()
"""

from noiseclock.core import likelihood, measure, objectives, schedules
from noiseclock.core.adaptive import Adaptive
from noiseclock.core.batch import Batch, Draw
from noiseclock.core.clock import Clock, PlotData
from noiseclock.core.contract import check_sampler
from noiseclock.core.gradient_variance import GradientVariance
from noiseclock.core.learned import LearnedDensity
from noiseclock.core.lookahead import Lookahead
from noiseclock.core.loss_based import LossEMA, LossHistory, LossSecondMoment
from noiseclock.core.names import sampler, schedule
from noiseclock.core.objectives import objective
from noiseclock.core.probes import Probe
from noiseclock.core.record import ByTime
from noiseclock.core.samplers import Beta, CosMap, Density, LogitNormal, Mode, Sampler, Setting, Uniform
from noiseclock.core.scheduled import LogNormal, LogSNRNormal, SpeeD
from noiseclock.core.schedules import Schedule
from noiseclock.core.uncertainty import Uncertainty
from noiseclock.core.variance_optimal import VarianceOptimal
from noiseclock.core.weightings import (
    P2,
    VLB,
    ChangeAware,
    Constant,
    Debiased,
    EDMWeight,
    MinSNR,
    Sigmoid,
    SoftMinSNR,
    TruncatedSNR,
    Weighting,
    weighting,
)
from noiseclock.core.wrappers import Annealed, Independent, Mixture, Shifted, Truncated

__version__ = "0.1.0"

__all__ = [
    "P2",
    "VLB",
    "Adaptive",
    "Annealed",
    "Batch",
    "Beta",
    "ByTime",
    "ChangeAware",
    "Clock",
    "Constant",
    "CosMap",
    "Debiased",
    "Density",
    "Draw",
    "EDMWeight",
    "GradientVariance",
    "Independent",
    "LearnedDensity",
    "LogNormal",
    "LogSNRNormal",
    "LogitNormal",
    "Lookahead",
    "LossEMA",
    "LossHistory",
    "LossSecondMoment",
    "MinSNR",
    "Mixture",
    "Mode",
    "PlotData",
    "Probe",
    "Sampler",
    "Schedule",
    "Setting",
    "Shifted",
    "Sigmoid",
    "SoftMinSNR",
    "SpeeD",
    "Truncated",
    "TruncatedSNR",
    "Uncertainty",
    "Uniform",
    "VarianceOptimal",
    "Weighting",
    "check_sampler",
    "likelihood",
    "measure",
    "objective",
    "objectives",
    "sampler",
    "schedule",
    "schedules",
    "weighting",
]
