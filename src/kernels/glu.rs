//! Gated linear units: what stands between the gate/up products and the down product.

use half::f16;

/// A gated linear unit of ggml (`ggml_glu_op`), for a gate value `g` and an up value `u`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// `max(g, 0) * u`.
    ReGlu,
    /// `gelu(g) * u` by tanh; like ggml's table, `gelu` takes and gives f16 where |g| < 10.
    GeGlu,
    /// `gelu(g) * u` by erf.
    GeGluErf,
    /// `g * sigmoid(1.702 g) * u`; like ggml's table, the first factor takes and gives f16.
    GeGluQuick,
    /// `silu(g) * u`.
    SwiGlu,
    /// `g * sigmoid(alpha g) * (u + 1)` with `g <= limit` and `-limit <= u <= limit`.
    SwiGluOai {
        /// Slope of the sigmoid.
        alpha: f32,
        /// Bound of both inputs.
        limit: f32,
    },
    /// `silu(g) * u` with `g <= limit` and `-limit <= u <= limit`.
    SwiGluClamp {
        /// Bound of both inputs.
        limit: f32,
    },
}

fn to_f16_and_back(v: f64) -> f64 {
    f16::from_f64(v).to_f64()
}

impl Glu {
    /// The naive oracle, in f64.
    pub fn of(self, g: f32, u: f32) -> f64 {
        let silu = |g: f64, slope: f64| g / (1.0 + (-slope * g).exp());
        let (g, u) = (f64::from(g), f64::from(u));
        match self {
            Self::ReGlu => g.max(0.0) * u,
            Self::GeGlu if g <= -10.0 => 0.0,
            Self::GeGlu if g >= 10.0 => g * u,
            Self::GeGlu => {
                let g = to_f16_and_back(g);
                let inner = (2.0 / std::f64::consts::PI).sqrt() * g * (1.0 + 0.044715 * g * g);
                to_f16_and_back(0.5 * g * (1.0 + inner.tanh())) * u
            }
            Self::GeGluErf => 0.5 * g * (1.0 + erf(g / std::f64::consts::SQRT_2)) * u,
            Self::GeGluQuick => to_f16_and_back(silu(to_f16_and_back(g), 1.702)) * u,
            Self::SwiGlu => silu(g, 1.0) * u,
            Self::SwiGluOai { alpha, limit } => {
                let limit = f64::from(limit);
                silu(g.min(limit), f64::from(alpha)) * (u.clamp(-limit, limit) + 1.0)
            }
            Self::SwiGluClamp { limit } => {
                let limit = f64::from(limit);
                silu(g.min(limit), 1.0) * u.clamp(-limit, limit)
            }
        }
    }
}

/// The error function by its Taylor series (Abramowitz and Stegun 7.1.6), for the oracle.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.5 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-17 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    sum * (-x * x).exp() * 2.0 / std::f64::consts::PI.sqrt()
}
