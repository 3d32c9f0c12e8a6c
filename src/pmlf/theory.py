"""What the paper's theory predicts: variance reduction, impulse responses, Gamma, the convergence bound."""

from pmlf.mechanism.theory import (
    ConvergenceBound,
    Problem,
    autocorrelation,
    convergence_bound,
    gamma_dp,
    gamma_sgd,
    impulse_response,
    momentum_weights,
    noise_gain,
    normalised_impulse_response,
    rho_squared,
    step_size_limit,
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
