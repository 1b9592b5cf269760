//! Memory and random values for tests.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use std::sync::Once;

use half::{bf16, f16};
use proptest::prelude::*;

use crate::isa::{Amx, Avx2};
use crate::kernels::amx::trial::with_fp16_if_it_works;
use crate::kernels::reference::{magnitudes, matvec};
use crate::tensor::{DType, QK8_0, Rows, Weights};

/// AMX: the CPU's where it has it, else the emulator's. With F16 where that works. Says so where there is neither.
pub fn amx() -> Option<Amx> {
    let amx = match amx_emu::install() {
        Ok(amx_emu::Mode::Native) => Amx::detect().map(with_fp16_if_it_works),
        // SAFETY: the emulator was installed just now, for all threads and for good.
        Ok(amx_emu::Mode::Emulated) => unsafe { Amx::assume_emulated() },
        Err(e) => {
            println!("skipped: no AMX emulator: {e}");
            return None;
        }
    };
    amx.inspect_err(|e| println!("skipped: {e}")).ok()
}

/// AMX as [`amx`] finds it, and where it multiplies F16 also as CPUs have it that do not.
pub fn amx_kinds() -> Vec<Amx> {
    let Some(amx) = amx() else { return Vec::new() };
    let mut kinds = vec![amx.without_fp16()];
    kinds.extend(amx.fp16().map(|_| amx));
    kinds
}

/// AVX2 where this CPU has it. Says once where it has not.
pub fn avx2() -> Option<Avx2> {
    static SAID: Once = Once::new();
    let isa = Avx2::detect();
    if isa.is_none() {
        SAID.call_once(|| println!("skipped: this CPU has no AVX2, FMA and F16C"));
    }
    isa
}

/// AVX2 as [`avx2`] finds it, and where it has AVX-VNNI also as CPUs have it that have not.
pub fn avx2_kinds() -> Vec<Avx2> {
    let Some(avx2) = avx2() else { return Vec::new() };
    let mut kinds = vec![avx2.without_vnni()];
    kinds.extend(avx2.vnni().map(|_| avx2));
    kinds
}

/// Makes tests of functions that take an instruction set: `name::avx512` and `name::avx2` call `name` with what the two
/// functions make of the tokens, or say that this CPU lacks one.
macro_rules! on_each_isa {
    ([$avx512:expr, $avx2:expr] $($test:ident)*) => {$(
        mod $test {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn avx512() {
                let Some(isa) = crate::isa::Avx512::detect() else { return println!("skipped: no AVX-512") };
                super::$test($avx512(isa));
            }

            #[test]
            fn avx2() {
                let Some(isa) = crate::isa::Avx2::detect() else { return println!("skipped: no AVX2") };
                super::$test($avx2(isa));
            }
        }
    )*};
}
pub(crate) use on_each_isa;

/// Values as elements of a type; for Q8_0, whole blocks.
pub fn bytes(dtype: DType, x: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => x.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::Bf16 => x.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        DType::Q8_0 => {
            let block = |b: &[f32; 32]| {
                let (scale, quants) = crate::kernels::reference::quantize_q8_0(b);
                [f16::from_f32(scale).to_le_bytes().to_vec(), quants.map(|q| q as u8).to_vec()].concat()
            };
            x.as_chunks::<32>().0.iter().flat_map(block).collect()
        }
    }
}

/// Zeroed memory, 64-byte aligned.
pub struct Aligned {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: plain memory; who shares the address sees to its use.
unsafe impl Sync for Aligned {}

impl Aligned {
    pub fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(64), 64).unwrap();
        // SAFETY: the size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        Self { ptr, layout }
    }

    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub fn f32(&self) -> &[f32] {
        // SAFETY: zeroed at first, so initialised; aligned; lives as long as self.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.layout.size() / 4) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.ptr, self.layout) }
    }
}

/// Bytes that end where an unreadable page begins: a read or write past their end is a crash.
pub struct Guarded {
    map: *mut u8,
    map_len: usize,
    start: usize,
    len: usize,
}

// SAFETY: plain memory; who shares the address sees to its use.
unsafe impl Sync for Guarded {}

impl Guarded {
    pub fn new(bytes: &[u8]) -> Self {
        // SAFETY: an anonymous mapping, then its last page made unreadable, then a copy in front of that page.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let data = bytes.len().next_multiple_of(page);
            let map_len = data + page;
            let map = libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(map, libc::MAP_FAILED);
            let map = map.cast::<u8>();
            assert_eq!(libc::mprotect(map.add(data).cast(), page, libc::PROT_NONE), 0);
            map.add(data - bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Self { map, map_len, start: data - bytes.len(), len: bytes.len() }
        }
    }

    /// Address of the first byte, also to write.
    pub fn ptr(&self) -> *mut u8 {
        self.map.wrapping_add(self.start)
    }
}

impl std::ops::Deref for Guarded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the copy made by `new`.
        unsafe { std::slice::from_raw_parts(self.map.add(self.start), self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.map.cast(), self.map_len) };
    }
}

/// Random numbers, good enough for tests and always the same (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [-1, 1).
    pub fn f32(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn vec(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.f32()).collect()
    }

    /// Runs of 32 values: ordinary ones, ones of any size, zeros, and such that need care.
    pub fn wild(&mut self, n: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(n + 31);
        while values.len() < n {
            let (kind, size) = (self.below(6), 2f32.powi(self.below(180) as i32 - 149));
            values.extend((0..32).map(|_| match kind {
                0 | 1 => self.f32(),
                2 | 3 => self.f32() * size,
                4 => 0.0,
                _ => self.odd(),
            }));
        }
        values.truncate(n);
        values
    }

    /// NaN of any payload, Inf, largest, denormal and signed zero values, and halves of a unit of BF16.
    pub fn odd(&mut self) -> f32 {
        let bits = self.bits() as u32;
        match self.below(12) {
            0 => [f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, f32::MAX, f32::MIN][self.below(6)],
            1 => f32::from_bits(0x7F80_0001 | bits),
            2 | 3 => f32::from_bits(bits & 0x807F_FFFF),
            4 | 5 => f32::from_bits(bits & 0xBFFF_0000 | 0x8000),
            _ => self.f32(),
        }
    }

    /// Weights of `dtype`, contiguous: BF16 values, or Q8_0 blocks with all quants from -128 to 127.
    pub fn weights(&mut self, dtype: DType, elements: usize) -> Vec<u8> {
        match dtype {
            DType::Q8_0 => (0..elements / QK8_0)
                .flat_map(|_| {
                    let scale = f16::from_f32(self.f32() * 0.01).to_le_bytes();
                    scale
                        .into_iter()
                        .chain(std::array::from_fn::<u8, QK8_0, _>(|_| self.bits() as u8))
                        .collect::<Vec<_>>()
                })
                .collect(),
            _ => (0..elements).flat_map(|_| bf16::from_f32(self.f32()).to_le_bytes()).collect(),
        }
    }
}

/// Values as bytes that end at an unreadable page but for `shift` bytes.
pub fn guarded(values: &[f32], shift: usize) -> Guarded {
    let mut bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    bytes.resize(bytes.len() + shift, 0);
    Guarded::new(&bytes)
}

/// The f32 in memory of any alignment.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

/// Whether both are NaN or the same bits.
pub fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// BF16 rows and tokens of which only some columns count: beside them are NaN and Inf, and behind the last row's a page that must not be
/// read. They begin and end at half groups of 32, as a NUMA node's parts do.
pub struct Part {
    pub k: usize,
    pub columns: Range<usize>,
    n: usize,
    bytes: Guarded,
    pub x: Vec<Vec<f32>>,
}

impl Part {
    /// `halves` half groups behind `before`, and `tail` columns more where they are the rows' last.
    pub fn new([before, halves, behind, tail]: [usize; 4], n: usize, tokens: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let halves = halves.max(usize::from(behind > 0));
        let columns = before * 16..(before + halves) * 16 + if behind == 0 { tail } else { 0 };
        let k = columns.end + behind * 16;
        let mut bytes = vec![0xFF; k * 2 * n];
        for row in bytes.chunks_mut(k * 2) {
            row[columns.start * 2..columns.end * 2].copy_from_slice(&random.weights(DType::Bf16, columns.len()));
        }
        let mut token = || (0..k).map(|i| if columns.contains(&i) { random.f32() } else { f32::INFINITY }).collect();
        let x = (0..tokens).map(|_| token()).collect();
        Self { k, n, bytes: Guarded::new(&bytes), x, columns }
    }

    /// The columns that count.
    pub fn rows(&self) -> Rows<'_> {
        let w = Weights::contiguous(DType::Bf16, &self.bytes, [self.k, self.n, 1]);
        w.rows(0, 0, self.n).columns(self.columns.start, self.columns.len())
    }

    /// Whether `got(token, row)` is what the oracle says.
    pub fn check(&self, got: impl Fn(usize, usize) -> f32) -> Result<(), TestCaseError> {
        for (t, x) in self.x.iter().enumerate() {
            let x = &x[self.columns.clone()];
            for (i, (want, size)) in matvec(self.rows(), x).into_iter().zip(magnitudes(self.rows(), x)).enumerate() {
                let got = got(t, i);
                prop_assert!((f64::from(got) - want).abs() <= 4e-6 * size, "token {t}, row {i}: {got}, not {want}");
            }
        }
        Ok(())
    }
}
