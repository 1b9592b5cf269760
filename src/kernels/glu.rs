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
        // f64::min would drop NaN.
        let at_most = |limit: f64, g: f64| if g > limit { limit } else { g };
        let (g, u) = (f64::from(g), f64::from(u));
        match self {
            // 0 also where g is NaN or u is Inf.
            Self::ReGlu => {
                if g > 0.0 {
                    g * u
                } else {
                    0.0
                }
            }
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
                silu(at_most(limit, g), f64::from(alpha)) * (u.clamp(-limit, limit) + 1.0)
            }
            Self::SwiGluClamp { limit } => {
                let limit = f64::from(limit);
                silu(at_most(limit, g), 1.0) * u.clamp(-limit, limit)
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

/// Defines `apply(glu, g, u)`, the unit of each lane of two vectors, where these are in scope for that type of vector:
/// the arithmetic by short names, `min` and `max` that give their second operand where one is NaN, `compare`, which gives
/// a mask, `zero_where` and `zero_unless` of a mask and a vector, `select(mask, yes, no)`, `abs`, `exp` and
/// `to_f16_and_back`.
macro_rules! vector_units {
    ($vector:ty, $features:literal) => {
        #[inline]
        #[target_feature(enable = $features)]
        fn apply(glu: Glu, g: $vector, u: $vector) -> $vector {
            let clamp = |u, limit: f32| {
                let below = min(set(limit), u);
                max(set(-limit), below)
            };
            match glu {
                Glu::SwiGlu => mul(times_sigmoid(g, g), u),
                Glu::SwiGluOai { alpha, limit } => {
                    let g = min(set(limit), g);
                    mul(times_sigmoid(g, mul(g, set(alpha))), add(clamp(u, limit), set(1.0)))
                }
                Glu::SwiGluClamp { limit } => {
                    let g = min(set(limit), g);
                    mul(times_sigmoid(g, g), clamp(u, limit))
                }
                Glu::ReGlu => zero_unless(compare::<_CMP_GT_OQ>(g, set(0.0)), mul(g, u)),
                Glu::GeGlu => {
                    let x = to_f16_and_back(g);
                    // 0.5 (1 + tanh z) = sigmoid(2 z).
                    let cubic = fmadd(mul(x, x), set(0.044_715), set(1.0));
                    let z2 = mul(mul(x, set(1.595_769)), cubic);
                    let gelu = to_f16_and_back(times_sigmoid(x, z2));
                    let high = compare::<_CMP_GE_OQ>(g, set(10.0));
                    let low = compare::<_CMP_LE_OQ>(g, set(-10.0));
                    // Below, ggml has 0 whatever u is.
                    zero_where(low, mul(select(high, g, gelu), u))
                }
                Glu::GeGluErf => {
                    let half = mul(g, set(0.5));
                    let erf = erf(mul(g, set(std::f32::consts::FRAC_1_SQRT_2)));
                    mul(fmadd(half, erf, half), u)
                }
                Glu::GeGluQuick => {
                    let x = to_f16_and_back(g);
                    let quick = times_sigmoid(x, mul(x, set(1.702)));
                    mul(to_f16_and_back(quick), u)
                }
            }
        }

        /// `x * sigmoid(z) = x / (1 + exp(-z))`.
        #[inline]
        #[target_feature(enable = $features)]
        fn times_sigmoid(x: $vector, z: $vector) -> $vector {
            let minus_z = xor(z, set(-0.0));
            div(x, add(set(1.0), exp(minus_z)))
        }

        /// The error function within 2e-7.
        #[inline]
        #[target_feature(enable = $features)]
        fn erf(x: $vector) -> $vector {
            let a = abs(x);
            let t = div(set(1.0), fmadd(a, set(series::ERF_SLOPE), set(1.0)));
            let [first, rest @ ..] = series::ERF;
            let mut p = set(first);
            for c in rest {
                p = fmadd(p, t, set(c));
            }
            let tail = mul(p, exp(xor(mul(a, a), set(-0.0))));
            let sign = and(x, set(-0.0));
            or(sub(set(1.0), tail), sign)
        }
    };
}

pub(super) use vector_units;
