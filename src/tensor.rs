//! Borrowed views of weights and activations: an address, shapes and strides, as ggml has them.
//!
//! A view owns nothing and checks nothing at run time beyond its shape: whoever makes one (the ggml seam, a test) promises
//! that the memory behind it lives and has that extent. Shapes are in elements, strides in bytes.

use std::marker::PhantomData;

use crate::isa::Reading;

/// Element type of a weight or of the KV cache, in the layout GGUF stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// ggml's `block_q8_0`: an f16 scale and 32 signed bytes, 34 bytes a block.
    Q8_0,
}

/// Elements of a Q8_0 block.
pub const QK8_0: usize = 32;
/// Bytes of a Q8_0 block: the f16 scale, then 32 quants.
pub const Q8_0_BYTES: usize = 34;

impl DType {
    /// Elements of the smallest unit that stands alone (1, or 32 for Q8_0).
    pub const fn block(self) -> usize {
        match self {
            Self::Q8_0 => QK8_0,
            _ => 1,
        }
    }

    /// Bytes of `k` contiguous elements; `k` is a multiple of [`DType::block`].
    pub const fn row_bytes(self, k: usize) -> usize {
        match self {
            Self::F32 => 4 * k,
            Self::F16 | Self::Bf16 => 2 * k,
            Self::Q8_0 => k / QK8_0 * Q8_0_BYTES,
        }
    }
}

/// Weights `[expert][n][k]`, row-major, rows contiguous in k. A plain matrix is one expert.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// Element type: BF16 or Q8_0 for the kernels.
    pub dtype: DType,
    /// Address of expert 0, row 0; any alignment.
    pub data: *const u8,
    /// Input features (columns).
    pub k: usize,
    /// Output features (rows).
    pub n: usize,
    /// Number of experts.
    pub experts: usize,
    /// Bytes from a row to the next.
    pub row_stride: usize,
    /// Bytes from an expert to the next.
    pub expert_stride: usize,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a read-only view of memory that outlives 'a.
unsafe impl Send for Weights<'_> {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Weights<'_> {}

impl<'a> Weights<'a> {
    /// A view of weights with explicit strides.
    ///
    /// # Safety
    /// For every expert and row, `dtype.row_bytes(k)` bytes at `data + expert * expert_stride + row * row_stride` are
    /// readable for `'a`.
    // SAFETY: contract above.
    pub unsafe fn from_raw(
        dtype: DType,
        data: *const u8,
        [k, n, experts]: [usize; 3],
        [row_stride, expert_stride]: [usize; 2],
    ) -> Self {
        debug_assert!(k.is_multiple_of(dtype.block()));
        Self { dtype, data, k, n, experts, row_stride, expert_stride, life: PhantomData }
    }

    /// A view of contiguous weights.
    ///
    /// # Panics
    /// If `bytes` is shorter than the shape needs.
    pub fn contiguous(dtype: DType, bytes: &'a [u8], [k, n, experts]: [usize; 3]) -> Self {
        let row = dtype.row_bytes(k);
        assert!(bytes.len() >= row * n * experts, "weights are shorter than their shape");
        // SAFETY: the length was checked just now.
        unsafe { Self::from_raw(dtype, bytes.as_ptr(), [k, n, experts], [row, row * n]) }
    }

    /// Rows `[row, row + n)` of one expert.
    ///
    /// # Panics
    /// In debug builds, if they lie outside.
    pub fn rows(&self, expert: usize, row: usize, n: usize) -> Rows<'a> {
        debug_assert!(expert < self.experts && row + n <= self.n);
        let offset = expert * self.expert_stride + row * self.row_stride;
        // SAFETY: inside the view, by its contract.
        let data = unsafe { self.data.add(offset) };
        let next = data.wrapping_add(n * self.row_stride);
        Rows {
            dtype: self.dtype,
            data,
            k: self.k,
            n,
            stride: self.row_stride,
            next,
            reading: Reading::best(),
            life: PhantomData,
        }
    }

    /// Rows `row, row + step, …` (`n` of them) of one expert.
    ///
    /// # Panics
    /// In debug builds, if they lie outside.
    pub fn rows_apart(&self, expert: usize, row: usize, step: usize, n: usize) -> Rows<'a> {
        debug_assert!(n == 0 || row + (n - 1) * step < self.n);
        let first = self.rows(expert, row, n.min(1));
        Rows { n, stride: step * self.row_stride, ..first }
    }

    /// Each expert's first `n` rows and the others: the parts of a merged gate/up matrix.
    ///
    /// # Panics
    /// If there are fewer than `n` rows.
    pub fn split(&self, n: usize) -> [Self; 2] {
        assert!(n <= self.n, "rows of the first part");
        let data = self.data.wrapping_add(n * self.row_stride);
        [Self { n, ..*self }, Self { n: self.n - n, data, ..*self }]
    }

    /// Bytes of one expert's rows.
    pub fn expert_bytes(&self) -> usize {
        self.dtype.row_bytes(self.k) * self.n
    }
}

/// A block of weight rows of one expert, in place: the left operand of a product.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Element type.
    pub dtype: DType,
    /// Address of the first row; any alignment.
    pub data: *const u8,
    /// Columns.
    pub k: usize,
    /// Rows.
    pub n: usize,
    /// Bytes from a row to the next.
    pub stride: usize,
    /// What this thread reads after this block, as far as it knows: a kernel may prefetch from here on. Only a hint; it may
    /// lie anywhere.
    pub next: *const u8,
    /// In which order to read them: a hint too.
    pub reading: Reading,
    life: PhantomData<&'a [u8]>,
}

impl Rows<'_> {
    /// Columns `[k0, k0 + k)` of the same rows; `k0` is a multiple of the type's block.
    pub fn columns(&self, k0: usize, k: usize) -> Self {
        debug_assert!(k0.is_multiple_of(self.dtype.block()) && k0 + k <= self.k);
        // SAFETY: inside the first row.
        let data = unsafe { self.data.add(self.dtype.row_bytes(k0)) };
        Self { data, k, ..*self }
    }

    /// Whether each row begins where the one before it ends.
    pub fn contiguous(&self) -> bool {
        self.stride == self.dtype.row_bytes(self.k)
    }

    /// The same rows, with the address that this thread reads next.
    pub fn then(self, next: *const u8) -> Self {
        Self { next, ..self }
    }

    /// The same rows, to be read in this order.
    pub fn by(self, reading: Reading) -> Self {
        Self { reading, ..self }
    }

    /// Address of row `i`.
    pub fn row(&self, i: usize) -> *const u8 {
        debug_assert!(i < self.n);
        // SAFETY: inside the view, by `Weights`' contract.
        unsafe { self.data.add(i * self.stride) }
    }
}

/// A read-only tensor of up to four dimensions with ggml's order: `ne[0]` is the innermost, strides `nb` in bytes.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Element type.
    pub dtype: DType,
    /// Address of element (0, 0, 0, 0).
    pub data: *const u8,
    /// Elements in each dimension.
    pub ne: [usize; 4],
    /// Bytes from an element (of dimension 0: a block) to the next in each dimension.
    pub nb: [usize; 4],
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a read-only view of memory that outlives 'a.
unsafe impl Send for View<'_> {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for View<'_> {}

impl View<'_> {
    /// A view with ggml's shape and strides.
    ///
    /// # Safety
    /// Every element the shape and strides name is readable for the view's lifetime.
    // SAFETY: contract above.
    pub unsafe fn from_raw(dtype: DType, data: *const u8, ne: [usize; 4], nb: [usize; 4]) -> Self {
        Self { dtype, data, ne, nb, life: PhantomData }
    }

    /// Address of row (i1, i2, i3).
    pub fn row(&self, i1: usize, i2: usize, i3: usize) -> *const u8 {
        debug_assert!(i1 < self.ne[1] && i2 < self.ne[2] && i3 < self.ne[3]);
        // SAFETY: inside the view, by its contract.
        unsafe { self.data.add(i1 * self.nb[1] + i2 * self.nb[2] + i3 * self.nb[3]) }
    }
}

/// A writable f32 tensor; workers write disjoint parts of it, so it is a raw address and not a slice.
#[derive(Clone, Copy, Debug)]
pub struct ViewMut<'a> {
    /// Address of element (0, 0, 0, 0).
    pub data: *mut u8,
    /// Elements in each dimension.
    pub ne: [usize; 4],
    /// Bytes from an element to the next in each dimension.
    pub nb: [usize; 4],
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: workers write disjoint elements; each writer says so where it writes.
unsafe impl Send for ViewMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for ViewMut<'_> {}

impl ViewMut<'_> {
    /// A writable view with ggml's shape and strides.
    ///
    /// # Safety
    /// Every element the shape and strides name is writable for the view's lifetime and nobody else's.
    // SAFETY: contract above.
    pub unsafe fn from_raw(data: *mut u8, ne: [usize; 4], nb: [usize; 4]) -> Self {
        Self { data, ne, nb, life: PhantomData }
    }

    /// Address of row (i1, i2, i3).
    pub fn row(&self, i1: usize, i2: usize, i3: usize) -> *mut f32 {
        debug_assert!(i1 < self.ne[1] && i2 < self.ne[2] && i3 < self.ne[3]);
        // SAFETY: inside the view, by its contract.
        unsafe { self.data.add(i1 * self.nb[1] + i2 * self.nb[2] + i3 * self.nb[3]).cast() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_bytes_are_ggmls() {
        assert_eq!(DType::Q8_0.row_bytes(64), 68);
        assert_eq!(DType::Bf16.row_bytes(7), 14);
    }

    #[test]
    fn rows_are_where_the_strides_say() {
        let bytes = vec![0u8; 2 * 3 * 4 * 2];
        let w = Weights::contiguous(DType::Bf16, &bytes, [4, 3, 2]);
        assert_eq!(w.rows(1, 2, 1).data as usize - bytes.as_ptr() as usize, (3 + 2) * 8);
        assert_eq!(w.rows(0, 1, 2).row(1) as usize - bytes.as_ptr() as usize, 16);
        let apart = w.rows_apart(1, 0, 2, 2).columns(1, 3);
        assert_eq!(apart.row(1) as usize - bytes.as_ptr() as usize, (3 + 2) * 8 + 2);
        assert_eq!((apart.n, apart.k), (2, 3));
    }
}
