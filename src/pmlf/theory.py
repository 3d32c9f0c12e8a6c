"""What the paper's theory predicts: variance reduction, impulse responses, Gamma, and the convergence bound."""

from pmlf.mechanism.convergence import ConvergenceBound, Problem, convergence_bound, step_size_limit
from pmlf.mechanism.theory import (
    autocorrelation,
    gamma_dp,
    gamma_sgd,
    impulse_response,
    momentum_weights,
    noise_gain,
    normalised_impulse_response,
    rho_squared,
)

__all__ = [
    "ConvergenceBound",
    "Problem",
    "autocorrelation",
    "convergence_bound",
    "gamma_dp",
    "gamma_sgd",
    "impulse_response",
    "momentum_weights",
    "noise_gain",
    "normalised_impulse_response",
    "rho_squared",
    "step_size_limit",
]
