//! Which of a model's tensors HiNa claims, and why not the others.

use ggml_hina::eligible::{Product, product, product_of};
use serde::Serialize;

use crate::gguf::Model;

/// Tensors of one use and type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// `experts`, `other products`, or `no product`.
    pub part: &'static str,
    /// ggml's name of the type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of them.
    pub bytes: u64,
    /// Why they are left to the CPU backend; none where they are claimed.
    pub left: Option<String>,
    /// One of their names.
    pub example: String,
}

/// The parts of a model, experts first.
const EXPERTS: &str = "experts";
const PLAIN: &str = "other products";
const NONE: &str = "no product";

/// All tensors of a model, grouped.
pub fn groups(model: &Model) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for tensor in &model.tensors {
        let (part, left) = match product_of(&tensor.name) {
            None => (NONE, Some("looked up or added, not multiplied".to_owned())),
            Some(p) => {
                let part = if p == Product::Experts { EXPERTS } else { PLAIN };
                (part, product(p, tensor.dtype()).err().map(|why| why.to_string()))
            }
        };
        let kind = tensor.type_name();
        match groups.iter_mut().find(|g| (g.part, &g.kind, &g.left) == (part, &kind, &left)) {
            Some(group) => {
                group.tensors += 1;
                group.bytes += tensor.bytes;
            }
            None => {
                let example = tensor.name.clone();
                groups.push(Group { part, kind, tensors: 1, bytes: tensor.bytes, left, example });
            }
        }
    }
    let rank = |g: &Group| [EXPERTS, PLAIN, NONE].iter().position(|p| *p == g.part);
    groups.sort_by_key(|g| (rank(g), std::cmp::Reverse(g.bytes)));
    groups
}

/// Bytes of the experts, and of those that are claimed.
pub fn experts(groups: &[Group]) -> (u64, u64) {
    let of = |f: &dyn Fn(&&Group) -> bool| groups.iter().filter(f).map(|g| g.bytes).sum();
    (of(&|g| g.part == EXPERTS), of(&|g| g.part == EXPERTS && g.left.is_none()))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::gguf::Tensor;

    /// A model of these tensors: name, ggml's type number, bytes.
    pub fn model(tensors: &[(&str, u32, u64)]) -> Model {
        let tensor = |&(name, kind, bytes): &(&str, u32, u64)| Tensor { name: name.into(), ne: vec![], kind, bytes };
        Model { tensors: tensors.iter().map(tensor).collect(), ..Model::default() }
    }

    #[test]
    fn groups_by_use_and_type() {
        let groups = groups(&model(&[
            ("token_embd.weight", 30, 50),
            ("blk.0.attn_q.weight", 30, 10),
            ("blk.0.ffn_up_exps.weight", 30, 100),
            ("blk.1.ffn_up_exps.weight", 30, 100),
            ("blk.0.ffn_down_exps.weight", 12, 60),
        ]));
        let found: Vec<_> = groups.iter().map(|g| (g.part, g.kind.as_str(), g.tensors, g.bytes)).collect();
        assert_eq!(found[..2], [("experts", "bf16", 2, 200), ("experts", "q4_K", 1, 60)]);
        assert_eq!(groups[0].left, None);
        assert_eq!(groups[1].left.as_deref(), Some("no kernel takes this weight type"));
        assert_eq!((groups[3].part, groups[3].example.as_str()), ("no product", "token_embd.weight"));
        assert_eq!(experts(&groups), (260, 200));
    }
}
