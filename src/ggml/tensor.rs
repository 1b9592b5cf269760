//! From ggml's tensors to the crate's views.

use std::ptr::NonNull;

use super::sys;
use crate::moe::Ids;
use crate::tensor::{DType, View, ViewMut, Weights};

/// The element type, where the kernels know it.
pub fn dtype(t: &sys::ggml_tensor) -> Option<DType> {
    match t.type_ {
        sys::GGML_TYPE_F32 => Some(DType::F32),
        sys::GGML_TYPE_F16 => Some(DType::F16),
        sys::GGML_TYPE_BF16 => Some(DType::Bf16),
        sys::GGML_TYPE_Q8_0 => Some(DType::Q8_0),
        _ => None,
    }
}

/// Source `i` of a node.
///
/// # Safety
/// The node's sources are null or valid for as long as the node is.
// SAFETY: contract above.
pub unsafe fn src(node: &sys::ggml_tensor, i: usize) -> Option<&sys::ggml_tensor> {
    // SAFETY: by the contract.
    unsafe { node.src[i].as_ref() }
}

/// Shape; ggml's sizes are never negative.
pub fn ne(t: &sys::ggml_tensor) -> [usize; 4] {
    t.ne.map(|n| n as usize)
}

/// Whether the elements of a row follow each other.
pub fn dense_rows(t: &sys::ggml_tensor) -> bool {
    // SAFETY: a type of a valid tensor.
    t.nb[0] == unsafe { sys::ggml_type_size(t.type_) }
}

/// Whether the tensor lies in host memory in ggml's own layout, and has an address.
///
/// A buffer type with a layout of its own (ggml's repacked or AMX weights) is no host buffer.
pub fn in_host_layout(t: &sys::ggml_tensor) -> bool {
    // SAFETY: a valid tensor; the owner of a view's memory is its source.
    let buffer = unsafe { if t.view_src.is_null() { t.buffer } else { (*t.view_src).buffer } };
    // SAFETY: a tensor's buffer is valid; a tensor without one (plain ggml contexts) has plain memory.
    !t.data.is_null() && NonNull::new(buffer).is_none_or(|b| unsafe { sys::ggml_backend_buffer_is_host(b.as_ptr()) })
}

/// A view of `t` for reading.
///
/// # Safety
/// The tensor's memory stays valid and unchanged in shape for as long as the view is used.
// SAFETY: contract above.
pub unsafe fn view(t: &sys::ggml_tensor) -> Option<View<'static>> {
    // SAFETY: by the contract; ggml allocates all of a tensor.
    dtype(t).map(|dtype| unsafe { View::from_raw(dtype, t.data.cast(), ne(t), t.nb) })
}

/// The expert ids of a product: I32 `[slots][tokens]`.
///
/// # Safety
/// As [`view`].
// SAFETY: contract above.
pub unsafe fn ids(t: &sys::ggml_tensor) -> Ids<'static> {
    // SAFETY: by the contract.
    unsafe { Ids::from_raw(t.data.cast(), t.ne[0] as usize, t.ne[1] as usize, [t.nb[0], t.nb[1]]) }
}

/// The first (`half` 0) or second half of each row of `t`.
///
/// # Safety
/// As [`view`].
// SAFETY: contract above.
pub unsafe fn half_rows(t: &sys::ggml_tensor, half: usize) -> Option<View<'static>> {
    // SAFETY: by the contract.
    let whole = unsafe { view(t) }?;
    let [n, ne1, ne2, ne3] = whole.ne;
    let data = whole.data.wrapping_add(half * (n / 2) * whole.nb[0]);
    // SAFETY: half of the elements of a valid view.
    Some(unsafe { View::from_raw(whole.dtype, data, [n / 2, ne1, ne2, ne3], whole.nb) })
}

/// A view of `t` for writing f32.
///
/// # Safety
/// As [`view`], and nobody else uses the memory meanwhile.
// SAFETY: contract above.
pub unsafe fn view_mut(t: &sys::ggml_tensor) -> ViewMut<'static> {
    // SAFETY: by the contract.
    unsafe { ViewMut::from_raw(t.data.cast(), ne(t), t.nb) }
}

/// The weights of a product: `[K][N][experts]` in ggml's order.
///
/// # Safety
/// As [`view`].
// SAFETY: contract above.
pub unsafe fn weights(t: &sys::ggml_tensor) -> Option<Weights<'static>> {
    let [k, n, experts, _] = ne(t);
    // SAFETY: by the contract.
    dtype(t).map(|d| unsafe { Weights::from_raw(d, t.data.cast(), [k, n, experts], [t.nb[1], t.nb[2]]) })
}
