//! Blocks of Q8_0 as BF16: quants times scales.

use std::arch::asm;
use std::arch::x86_64::*;

use crate::kernels::amx::{TILE, Tiling};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// How far ahead weights are prefetched, in blocks.
const AHEAD: usize = 32;
/// Blocks whose scales are gathered at a time, well before they are wanted: what was just stored is not there at once.
const CHUNK: usize = 32;

/// A block's scales of 16 rows: `weight = scale * (2^15 + quant + 128) + less`.
#[repr(C, align(64))]
pub struct Scales {
    scale: [f32; TILE],
    less: [f32; TILE],
}

/// How rows become BF16.
pub struct Conversion<'a> {
    pub rows: Rows<'a>,
    pub tiling: Tiling,
    /// Blocks of a row.
    pub blocks: usize,
    /// From a row of a tile to the next one, and to each of 16, in bytes.
    stride: usize,
    offsets: __m512i,
    /// Whether to prefetch: not where rows have gaps, as the hardware does better by itself there, nor where they are in L2.
    along: bool,
}

impl Conversion<'_> {
    /// Of rows in such tiles.
    ///
    /// # Safety
    /// AVX-512 is there.
    // SAFETY: contract above.
    pub unsafe fn new(rows: Rows<'_>, tiling: Tiling, along: bool) -> Conversion<'_> {
        let stride = rows.stride * tiling.apart;
        // SAFETY: the caller's contract.
        let offsets = unsafe { offsets(tiling.height, stride) };
        Conversion { rows, tiling, blocks: rows.k / QK8_0, stride, offsets, along }
    }

    /// Address of tile `t`.
    fn tile(&self, t: usize) -> *const u8 {
        self.rows.row(self.tiling.start(t))
    }

    /// Block `b` of tile `t` as BF16 to lines that are so many bytes apart; blocks are taken in turn, because their scales come [`CHUNK`] at
    /// a time. Prefetches what is read [`AHEAD`] blocks later.
    ///
    /// # Safety
    /// They exist; the lines are writable and aligned; AVX-512 is there.
    // SAFETY: contract above.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    pub unsafe fn block(&self, t: usize, b: usize, scales: &mut [Scales; CHUNK], to: (*mut u8, usize)) {
        let w = self.tile(t).wrapping_add(b * Q8_0_BYTES);
        // SAFETY: the caller's contract.
        unsafe {
            if b.is_multiple_of(CHUNK) {
                for (i, scales) in scales.iter_mut().enumerate().take(self.blocks - b) {
                    scales.gather(w.add(i * Q8_0_BYTES), self.offsets);
                }
            }
            widen((w, self.stride), self.tiling.height, &scales[b % CHUNK], to);
        }
        // A line of each row is about two blocks.
        if self.along && b.is_multiple_of(2) {
            let ahead = b + AHEAD.min(self.blocks);
            let at = match ahead.checked_sub(self.blocks) {
                None => self.tile(t).wrapping_add(ahead * Q8_0_BYTES),
                Some(b) if t + 1 < self.tiling.count() => self.tile(t + 1).wrapping_add(b * Q8_0_BYTES),
                Some(b) => self.rows.next.wrapping_add(b * Q8_0_BYTES),
            };
            for row in 0..TILE {
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(row * self.stride).cast());
            }
        }
    }
}

/// From the first of a tile's rows to each of 16; those past its height repeat the last.
///
/// # Safety
/// AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
unsafe fn offsets(height: usize, stride: usize) -> __m512i {
    debug_assert!(stride * TILE < i32::MAX as usize);
    let offsets: [i32; TILE] = std::array::from_fn(|row| (row.min(height - 1) * stride) as i32);
    // SAFETY: an array of 64 bytes.
    unsafe { _mm512_loadu_si512(offsets.as_ptr().cast()) }
}

impl Scales {
    /// Room for those of some blocks.
    pub const CHUNK: [Self; CHUNK] = [const { Self { scale: [0.0; TILE], less: [0.0; TILE] } }; CHUNK];

    /// The scales of a block of 16 rows, that lie `offsets` bytes from `w` on.
    ///
    /// BF16 keeps the upper half of an f32, which makes weights smaller by 0.72 / 256 on average: so much are the scales larger. What BF16
    /// holds exactly stays so, as the next larger value is farther than that. They keep 15 bits, so that times 2^15 + 128 they are exact, and
    /// quants times them too.
    ///
    /// # Safety
    /// 4 bytes are readable at each; AVX-512 F is there.
    // SAFETY: contract above.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn gather(&mut self, w: *const u8, offsets: __m512i) {
        // SAFETY: the caller's contract; both arrays are 64 bytes, aligned.
        unsafe {
            let words = _mm512_i32gather_epi32::<1>(offsets, w.cast());
            let scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
            let scale = _mm512_castps_si512(_mm512_mul_ps(scale, _mm512_set1_ps(1.0 + 0.72 / 256.0)));
            let scale = _mm512_castsi512_ps(_mm512_and_si512(scale, _mm512_set1_epi32(!0 << 9)));
            _mm512_store_ps(self.scale.as_mut_ptr(), scale);
            _mm512_store_ps(self.less.as_mut_ptr(), _mm512_mul_ps(scale, _mm512_set1_ps(-32896.0)));
        }
    }
}

/// The 32 quants of each of `height` rows' blocks, `stride` bytes apart, as BF16, times their scales, to lines `apart` bytes apart.
///
/// A quant + 128 in bits 8 to 15 of the f32 2^15 is 2^15 + quant + 128. In assembler because the compiler makes a masked `vpermb` a
/// `vpermt2b`, which has three operations, and sets up the mask for each row.
///
/// # Safety
/// The blocks are readable, at most 16, and the lines writable and aligned; the features are there.
// SAFETY: contract above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
unsafe fn widen((w, stride): (*const u8, usize), height: usize, scales: &Scales, (to, apart): (*mut u8, usize)) {
    const EVEN: [u8; 64] = every_second(0);
    const ODD: [u8; 64] = every_second(1);
    debug_assert!((1..=TILE).contains(&height));
    // SAFETY: reads the rows' quants and scales, writes a line of `to` for each, which is aligned to lines.
    unsafe {
        let (even, odd) = (_mm512_loadu_si512(EVEN.as_ptr().cast()), _mm512_loadu_si512(ODD.as_ptr().cast()));
        asm!(
            "2:",
            "vpxor {less:y}, {sign:y}, ymmword ptr [{w} + 2]",
            "vmovdqa64 {e}, {magic}",
            "vmovdqa64 {o}, {magic}",
            "vpermb {e}{{{byte}}}, {even}, {less}",
            "vpermb {o}{{{byte}}}, {odd}, {less}",
            "vbroadcastss {less}, dword ptr [{s} + 64]",
            "vfmadd132ps {e}, {less}, dword ptr [{s}]{{1to16}}",
            "vfmadd132ps {o}, {less}, dword ptr [{s}]{{1to16}}",
            "add {w}, {stride}",
            "add {s}, 4",
            "vpsrld {e}, {e}, 16",
            // e | o & high
            "vpternlogd {e}, {o}, {high}, 0xf8",
            "vmovdqa64 [{to}], {e}",
            "add {to}, {apart}",
            "dec {rows}",
            "jnz 2b",
            less = out(zmm_reg) _, e = out(zmm_reg) _, o = out(zmm_reg) _,
            sign = in(ymm_reg) _mm256_set1_epi8(-128), magic = in(zmm_reg) _mm512_set1_epi32(0x4700_0000),
            even = in(zmm_reg) even, odd = in(zmm_reg) odd, high = in(zmm_reg) _mm512_set1_epi32(0xffff_0000_u32 as i32),
            byte = in(kreg) 0x2222_2222_2222_2222_u64, stride = in(reg) stride, apart = in(reg) apart, rows = inout(reg) height => _,
            w = inout(reg) w => _, to = inout(reg) to => _, s = inout(reg) scales => _, options(nostack)
        );
    }
}

/// For each dword the number of the byte that goes into its second byte: every second one, from `first` on.
const fn every_second(first: u8) -> [u8; 64] {
    let (mut index, mut i) = ([0; 64], 0);
    while i < 64 {
        index[i] = (i / 4 * 2) as u8 + first;
        i += 1;
    }
    index
}
