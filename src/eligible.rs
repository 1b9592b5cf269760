//! Which products are ours, by operation and weight type: the one rule that the plugin and `hina-doctor` share.
//!
//! A node that passes still has to have a shape and a place in memory that the kernels take (`ggml::claim`).

use std::fmt;

use crate::tensor::DType;

/// A product with weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Product {
    /// `MUL_MAT_ID`: each token with its own experts' weights.
    Experts,
    /// `MUL_MAT`: all tokens with one matrix.
    Plain,
}

/// Why a product is left to ggml's CPU backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// No kernel multiplies this weight type in place.
    Type,
}

impl Left {
    /// The reason in words.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Type => "no kernel takes this weight type",
        }
    }
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Whether a product with weights of this type is ours; a type that no kernel knows is none.
///
/// # Errors
/// Why it is not.
pub fn product(_product: Product, weights: Option<DType>) -> Result<(), Left> {
    match weights {
        Some(DType::Bf16 | DType::Q8_0) => Ok(()),
        _ => Err(Left::Type),
    }
}

/// The product that llama.cpp uses a tensor of a GGUF file in, by the tensor's name; none for one that is in no product
/// (norms, biases, embeddings that are looked up).
pub fn product_of(name: &str) -> Option<Product> {
    let stem = name.strip_suffix(".weight")?;
    let part = stem.strip_prefix("blk.").map_or(stem, |rest| rest.split_once('.').map_or("", |(_, part)| part));
    if part.ends_with("_exps") || part.ends_with("_chexps") {
        return Some(Product::Experts);
    }
    let looked_up = part.starts_with("token_embd") || part.starts_with("position_embd") || part.contains("norm");
    let multiplied = ["attn_", "ffn_", "output", "ssm_in", "ssm_out", "nextn"].iter().any(|p| part.starts_with(p));
    (multiplied && !looked_up).then_some(Product::Plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_gguf_tensors() {
        let of = product_of;
        assert_eq!(of("blk.3.ffn_gate_exps.weight"), Some(Product::Experts));
        assert_eq!(of("blk.47.ffn_gate_up_exps.weight"), Some(Product::Experts));
        for plain in ["blk.0.attn_q.weight", "blk.0.ffn_up_shexp.weight", "blk.0.ffn_gate_inp.weight", "output.weight"]
        {
            assert_eq!(of(plain), Some(Product::Plain), "{plain}");
        }
        for none in ["blk.0.attn_norm.weight", "output_norm.weight", "token_embd.weight", "blk.0.ffn_down_exps.bias"] {
            assert_eq!(of(none), None, "{none}");
        }
    }

    #[test]
    fn unknown_types_are_left() {
        assert_eq!(product(Product::Experts, Some(DType::Bf16)), Ok(()));
        assert_eq!(product(Product::Plain, Some(DType::Q8_0)), Ok(()));
        assert_eq!(product(Product::Plain, Some(DType::F16)), Err(Left::Type));
        assert_eq!(product(Product::Experts, None), Err(Left::Type));
    }
}
