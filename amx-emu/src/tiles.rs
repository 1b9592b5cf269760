//! The architectural state of AMX and what each instruction does to it.

use crate::{fp, int8};

/// Tile registers of palette 1.
pub const TILES: usize = 8;
/// Most rows a tile of palette 1 may have.
pub const MAX_ROWS: usize = 16;
/// Most bytes a row of a tile of palette 1 may have.
pub const MAX_COLSB: usize = 64;

/// Why an instruction did not complete, as the processor would say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `#UD`, invalid opcode. Linux delivers it as `SIGILL`.
    InvalidOpcode,
    /// `#GP(0)`, general protection: a tile configuration that is not valid. Linux delivers it as `SIGSEGV`.
    GeneralProtection,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Fault::InvalidOpcode => "invalid opcode (#UD)",
            Fault::GeneralProtection => "general protection (#GP): the tile configuration is not valid",
        })
    }
}

impl std::error::Error for Fault {}

/// The dot-product instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dot {
    /// `TDPBF16PS`: pairs of BF16 into f32. Denormal inputs and outputs are zero.
    Bf16,
    /// `TDPFP16PS`: pairs of FP16 into f32. Denormal FP16 inputs keep their value; f32 denormals are zero.
    Fp16,
    /// `TDPBSSD`: groups of four, signed bytes times signed bytes, into i32.
    SignedSigned,
    /// `TDPBSUD`: signed bytes (second operand) times unsigned bytes (third operand).
    SignedUnsigned,
    /// `TDPBUSD`: unsigned bytes (second operand) times signed bytes (third operand).
    UnsignedSigned,
    /// `TDPBUUD`: unsigned bytes times unsigned bytes.
    UnsignedUnsigned,
}

/// One tile register: 16 rows of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Tile(pub [[u8; MAX_COLSB]; MAX_ROWS]);

impl Tile {
    const ZERO: Tile = Tile([[0; MAX_COLSB]; MAX_ROWS]);

    /// The `i`-th pair of bytes of a row, as the processor reads it (little endian).
    #[inline(always)]
    pub fn u16(&self, row: usize, i: usize) -> u16 {
        u16::from_le_bytes([self.0[row][2 * i], self.0[row][2 * i + 1]])
    }

    /// The `i`-th group of four bytes of a row.
    #[inline(always)]
    pub fn dword(&self, row: usize, i: usize) -> [u8; 4] {
        let r = &self.0[row];
        [r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]]
    }

    /// Writes the `i`-th group of four bytes of a row.
    #[inline(always)]
    pub fn set_dword(&mut self, row: usize, i: usize, value: [u8; 4]) {
        self.0[row][4 * i..4 * i + 4].copy_from_slice(&value);
    }
}

/// The sizes of one product `C[m][n] += A[m][k] * B[k][n]`, in elements of four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// The tile state of one thread: the configuration (`TILECFG`) and the eight tile registers (`TILEDATA`).
///
/// The emulator keeps one of these for each thread. It is public because it is useful alone: on a CPU that
/// has AMX it is the model to hold the hardware against.
///
/// ```
/// use amx_emu::{Dot, Tiles};
///
/// let mut config = [0u8; 64];
/// config[0] = 1; // palette
/// for (tile, (rows, colsb)) in [(2, 8), (2, 4), (1, 8)].into_iter().enumerate() {
///     config[16 + 2 * tile] = colsb;
///     config[48 + tile] = rows;
/// }
/// let mut tiles = Tiles::new();
/// tiles.load_config(&config)?;
/// // A: two rows of four signed bytes. B: one row of two groups of four.
/// tiles.load(1, |row, out| out.copy_from_slice(&[[1u8, 2, 3, 4], [5, 6, 7, 8]][row]))?;
/// tiles.load(2, |_, out| out.copy_from_slice(&[1, 1, 1, 1, 2, 0, 0, 0]))?;
/// tiles.dot(Dot::SignedSigned, 0, 1, 2)?;
/// assert_eq!(tiles.tile(0)[0][..8], [10, 0, 0, 0, 2, 0, 0, 0]);
/// assert_eq!(tiles.tile(0)[1][..8], [26, 0, 0, 0, 10, 0, 0, 0]);
/// # Ok::<(), amx_emu::Fault>(())
/// ```
#[derive(Clone)]
#[repr(C, align(64))]
pub struct Tiles {
    data: [Tile; TILES],
    colsb: [u16; TILES],
    rows: [u8; TILES],
    start_row: u8,
    /// `TILES_CONFIGURED` of the SDM: false in the initial state.
    configured: bool,
}

impl Default for Tiles {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Tiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tiles")
            .field("configured", &self.configured)
            .field("start_row", &self.start_row)
            .field("rows", &self.rows)
            .field("colsb", &self.colsb)
            .finish_non_exhaustive()
    }
}

impl Tiles {
    /// The initial state: no configuration, all tiles zero.
    pub const fn new() -> Self {
        Tiles { data: [Tile::ZERO; TILES], colsb: [0; TILES], rows: [0; TILES], start_row: 0, configured: false }
    }

    /// `LDTILECFG`. Palette 0 returns to the initial state; palette 1 takes the shapes and zeroes all tiles.
    ///
    /// # Errors
    /// [`Fault::GeneralProtection`], with the state unchanged: a palette above 1, a reserved byte that is not
    /// zero, a tile of more than 16 rows or 64 bytes, or one with rows but no bytes or bytes but no rows.
    pub fn load_config(&mut self, config: &[u8; 64]) -> Result<(), Fault> {
        match config[0] {
            0 => {
                self.release();
                return Ok(());
            }
            1 => {}
            _ => return Err(Fault::GeneralProtection),
        }
        let reserved = [&config[2..16], &config[32..48], &config[56..64]];
        if reserved.iter().any(|bytes| bytes.iter().any(|&b| b != 0)) {
            return Err(Fault::GeneralProtection);
        }
        let mut colsb = [0; TILES];
        let mut rows = [0; TILES];
        for t in 0..TILES {
            colsb[t] = u16::from_le_bytes([config[16 + 2 * t], config[17 + 2 * t]]);
            rows[t] = config[48 + t];
            let too_big = usize::from(colsb[t]) > MAX_COLSB || usize::from(rows[t]) > MAX_ROWS;
            if too_big || (colsb[t] == 0) != (rows[t] == 0) {
                return Err(Fault::GeneralProtection);
            }
        }
        self.release();
        (self.colsb, self.rows) = (colsb, rows);
        self.start_row = config[1];
        self.configured = true;
        Ok(())
    }

    /// `STTILECFG`: the configuration as `LDTILECFG` takes it, or zeros in the initial state.
    pub fn store_config(&self) -> [u8; 64] {
        let mut config = [0; 64];
        if self.configured {
            config[0] = 1;
            config[1] = self.start_row;
            for t in 0..TILES {
                config[16 + 2 * t..18 + 2 * t].copy_from_slice(&self.colsb[t].to_le_bytes());
                config[48 + t] = self.rows[t];
            }
        }
        config
    }

    /// `TILERELEASE`: back to the initial state.
    pub fn release(&mut self) {
        self.data.fill(Tile::ZERO);
        self.colsb = [0; TILES];
        self.rows = [0; TILES];
        self.start_row = 0;
        self.configured = false;
    }

    /// `TILEZERO`.
    ///
    /// # Errors
    /// [`Fault::InvalidOpcode`] for a tile that is not configured.
    pub fn zero(&mut self, tile: u8) -> Result<(), Fault> {
        let t = self.valid(tile)?;
        self.data[t] = Tile::ZERO;
        self.start_row = 0;
        Ok(())
    }

    /// `TILELOADD` and `TILELOADDT1`: asks `read` for each row from `start_row` on, `colsb` bytes each, and
    /// zeroes what is above.
    ///
    /// # Errors
    /// [`Fault::InvalidOpcode`] for a tile that is not configured, one whose `colsb` is not a multiple of 4,
    /// or a `start_row` at or above its rows.
    pub fn load(&mut self, tile: u8, mut read: impl FnMut(usize, &mut [u8])) -> Result<(), Fault> {
        self.try_load(tile, |row, out| {
            read(row, out);
            true
        })
        .map(|_| ())
    }

    /// `TILESTORED`: hands `write` each row from `start_row` on, `colsb` bytes each.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn store(&mut self, tile: u8, mut write: impl FnMut(usize, &[u8])) -> Result<(), Fault> {
        self.try_store(tile, |row, bytes| {
            write(row, bytes);
            true
        })
        .map(|_| ())
    }

    /// A dot-product instruction, `dst += a * b`. A is m x k, B is k x n in groups of two (BF16, FP16) or four
    /// (bytes), `dst` is m x n of 32 bits.
    ///
    /// # Errors
    /// [`Fault::InvalidOpcode`] where two operands are the same tile, one is not configured, a `colsb` is not
    /// a multiple of 4, or the shapes do not match.
    pub fn dot(&mut self, op: Dot, dst: u8, a: u8, b: u8) -> Result<(), Fault> {
        if dst == a || dst == b || a == b {
            return Err(Fault::InvalidOpcode);
        }
        let (d, a, b) = (self.valid(dst)?, self.valid(a)?, self.valid(b)?);
        let size = self.product(d, a, b)?;
        // The operands differ, so taking C out and back is the only copy.
        let mut c = self.data[d];
        let (ta, tb) = (&self.data[a], &self.data[b]);
        match op {
            Dot::Bf16 => fp::bf16(&mut c, ta, tb, size),
            Dot::Fp16 => fp::fp16(&mut c, ta, tb, size),
            Dot::SignedSigned => int8::dot::<true, true>(&mut c, ta, tb, size),
            Dot::SignedUnsigned => int8::dot::<true, false>(&mut c, ta, tb, size),
            Dot::UnsignedSigned => int8::dot::<false, true>(&mut c, ta, tb, size),
            Dot::UnsignedUnsigned => int8::dot::<false, false>(&mut c, ta, tb, size),
        }
        for row in &mut c.0[..size.m] {
            row[4 * size.n..].fill(0);
        }
        c.0[size.m..].fill([0; MAX_COLSB]);
        self.data[d] = c;
        self.start_row = 0;
        Ok(())
    }

    /// The bytes of a tile register, with zeros above its configured rows and bytes.
    ///
    /// # Panics
    /// For a tile above 7.
    pub fn tile(&self, tile: usize) -> &[[u8; MAX_COLSB]; MAX_ROWS] {
        &self.data[tile].0
    }

    /// [`load`](Self::load) with a `read` that may fail: then `start_row` names the row and the result is
    /// false, so that the same instruction can be run again from there.
    pub(crate) fn try_load(&mut self, tile: u8, mut read: impl FnMut(usize, &mut [u8]) -> bool) -> Result<bool, Fault> {
        let (t, rows, colsb) = self.movable(tile)?;
        let start = usize::from(self.start_row);
        self.data[t].0[start..].fill([0; MAX_COLSB]);
        for row in start..rows {
            let out = &mut self.data[t].0[row][..colsb];
            if !read(row, out) {
                out.fill(0);
                self.start_row = row as u8;
                return Ok(false);
            }
        }
        self.start_row = 0;
        Ok(true)
    }

    /// [`store`](Self::store) with a `write` that may fail, as in [`try_load`](Self::try_load).
    pub(crate) fn try_store(&mut self, tile: u8, mut write: impl FnMut(usize, &[u8]) -> bool) -> Result<bool, Fault> {
        let (t, rows, colsb) = self.movable(tile)?;
        for row in usize::from(self.start_row)..rows {
            if !write(row, &self.data[t].0[row][..colsb]) {
                self.start_row = row as u8;
                return Ok(false);
            }
        }
        self.start_row = 0;
        Ok(true)
    }

    /// SDM: `#UD` unless tiles are configured and this one exists and has a shape.
    fn valid(&self, tile: u8) -> Result<usize, Fault> {
        let t = usize::from(tile);
        // Before any configuration all rows are 0, so this is also the check of TILES_CONFIGURED.
        if t < TILES && self.rows[t] != 0 { Ok(t) } else { Err(Fault::InvalidOpcode) }
    }

    /// SDM exception class AMX-E3: what load and store ask of a tile. Gives (tile, rows, colsb).
    fn movable(&self, tile: u8) -> Result<(usize, usize, usize), Fault> {
        let t = self.valid(tile)?;
        if !self.colsb[t].is_multiple_of(4) || self.start_row >= self.rows[t] {
            return Err(Fault::InvalidOpcode);
        }
        Ok((t, usize::from(self.rows[t]), usize::from(self.colsb[t])))
    }

    /// SDM exception class AMX-E4: what a dot product asks of its three shapes.
    fn product(&self, d: usize, a: usize, b: usize) -> Result<Product, Fault> {
        let whole = [d, a, b].iter().all(|&t| self.colsb[t].is_multiple_of(4));
        let fits = self.rows[d] == self.rows[a]
            && self.colsb[d] == self.colsb[b]
            && self.colsb[a] / 4 == u16::from(self.rows[b]);
        if !whole || !fits {
            return Err(Fault::InvalidOpcode);
        }
        Ok(Product { m: self.rows[d].into(), n: usize::from(self.colsb[d]) / 4, k: self.rows[b].into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load that stops leaves the rows before it, zeros from there on, and goes on from there.
    #[test]
    fn a_load_that_stops() {
        let mut config = [0; 64];
        (config[0], config[16], config[48]) = (1, 64, 8);
        let mut tiles = Tiles::new();
        tiles.load_config(&config).unwrap();
        tiles.load(0, |_, out| out.fill(1)).unwrap();
        let stopped = tiles.try_load(0, |row, out| {
            out[..20].fill(2);
            row < 3 && {
                out.fill(2);
                true
            }
        });
        assert_eq!((stopped, tiles.store_config()[1]), (Ok(false), 3));
        for row in 0..16 {
            assert_eq!(tiles.tile(0)[row], [if row < 3 { 2 } else { 0 }; 64], "row {row}");
        }
        let mut rows = Vec::new();
        tiles
            .load(0, |row, out| {
                rows.push(row);
                out.fill(3);
            })
            .unwrap();
        assert_eq!((rows, tiles.store_config()), (vec![3, 4, 5, 6, 7], config));
    }
}
