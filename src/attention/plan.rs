//! How an attention operation is cut, and where its scratch lies. Everything here follows from the shapes alone.

use super::{Params, dense, is_mask};
use crate::kernels::amx::attention::{BLOCK, Room, TileAttention};
use crate::kernels::attention::{LANES, State, block_len};
use crate::tensor::{DType, View};

/// Largest head size of K and of V.
const MAX_D: usize = 1024;
/// Query rows of a tile: enough to make widening K and V cheap, few enough for their sums to stay in the L2 cache.
const TILE_ROWS: usize = 64;
/// Most query rows of a tile: a group of this many heads (MLA) still reads the cache once.
pub const MAX_TILE_ROWS: usize = 128;
/// Most tiles that a thread takes together, each of at most 16 rows.
pub const MAX_BUNDLE: usize = MAX_TILE_ROWS / LANES;
/// Bytes of a block of K and V of tiles that are taken together, at most: as many again are fetched meanwhile, and both should stay in
/// the smallest second-level caches (1 MiB).
const BUNDLE_BYTES: usize = 256 << 10;
/// Most panels: full ones of a tile and two for the rest, or two for each of several tiles.
pub const MAX_PANELS: usize = 2 * MAX_BUNDLE;
/// Fewest positions of a chunk: with fewer, merging costs more than it spreads.
const MIN_CHUNK: usize = 256;
/// Items of work that keep the largest machines busy.
const ENOUGH_ITEMS: usize = 128;
/// Most chunks: as many as those items, of one tile.
pub const MAX_CHUNKS: usize = ENOUGH_ITEMS;

/// Shapes, cut and scratch of one operation. A *unit* is the query rows of one stream that share their K and V heads.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub d: usize,
    pub dv: usize,
    pub n_kv: usize,
    /// Heads of a unit.
    pub group: usize,
    /// Units in a stream.
    pub groups: usize,
    pub streams: usize,
    /// Query rows of a unit: its heads for each query position, heads first.
    pub unit_rows: usize,
    pub tile_rows: usize,
    /// Tiles of a unit.
    pub tiles: usize,
    /// Positions that are widened at a time.
    pub block: usize,
    /// Positions of a chunk, a multiple of `block`.
    pub chunk_len: usize,
    pub chunks: usize,
    /// V is the beginning of K's rows: one block serves both.
    pub shared: bool,
    /// Most tiles that are taken together: those of heads whose rows of a position lie side by side.
    pub bundle: usize,
}

/// Where a query row comes from.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub query: usize,
    pub head: usize,
    pub stream: usize,
}

impl Plan {
    pub fn new(p: &Params<'_>) -> Option<Self> {
        let [d, n_q, heads, streams] = p.q.ne;
        let [dv, n_kv] = [p.v.ne[0], p.k.ne[1]];
        let divides = |part: usize, whole: usize| part > 0 && whole.is_multiple_of(part);
        let types = p.q.dtype == DType::F32 && [p.q, p.k, p.v].iter().all(dense);
        let extents = [d, dv, n_q, heads, streams, n_kv].iter().all(|&n| n > 0) && d <= MAX_D && dv <= MAX_D;
        let agree = p.k.ne[0] == d && p.v.ne[1] == n_kv && p.dst.ne == [dv, heads, n_q, streams] && p.dst.nb[0] == 4;
        let broadcast = [p.k, p.v].iter().all(|t| divides(t.ne[2], heads) && divides(t.ne[3], streams));
        let mask = p.mask.is_none_or(|m| is_mask(&m) && m.ne[0] >= n_kv && m.ne[1] >= n_q && m.ne[2] * m.ne[3] > 0);
        let sinks = p.sinks.is_none_or(|s| s.dtype == DType::F32 && s.ne[0] >= heads);
        if !(types && extents && agree && broadcast && mask && sinks) {
            return None;
        }
        let group = gcd(heads / p.k.ne[2], heads / p.v.ne[2]);
        let unit_rows = n_q * group;
        let tile_rows = if group >= TILE_ROWS { group.min(MAX_TILE_ROWS) } else { TILE_ROWS / group * group };
        let tile_rows = tile_rows.min(unit_rows);
        let tiles = unit_rows.div_ceil(tile_rows);
        let groups = heads / group;
        let shared =
            p.k.data == p.v.data && p.k.dtype == p.v.dtype && p.k.ne[2..] == p.v.ne[2..] && p.k.nb == p.v.nb && dv <= d;
        let block = if shared && d > 256 { 32 } else { 64 };
        let all_tiles = tiles * groups * streams;
        let bundle = if tiles == 1 && tile_rows <= LANES { bundle(p, groups, block) } else { 1 };
        let chunk_len = n_kv.div_ceil(ENOUGH_ITEMS.div_ceil(all_tiles)).max(MIN_CHUNK).next_multiple_of(block);
        let chunks = n_kv.div_ceil(chunk_len);
        Some(Self {
            d,
            dv,
            n_kv,
            group,
            groups,
            streams,
            unit_rows,
            tile_rows,
            tiles,
            block,
            chunk_len,
            chunks,
            shared,
            bundle,
        })
    }

    /// The same work for AMX: four groups of 16 positions share each load of the queries, and the sums pass through
    /// memory half as often.
    pub fn on_tiles(self) -> Self {
        Self { block: BLOCK, ..self }
    }

    /// Tiles of a stream.
    pub fn stream_tiles(&self) -> usize {
        self.tiles * self.groups
    }

    /// Tiles times chunks.
    fn items(&self) -> usize {
        self.stream_tiles() * self.streams * self.chunks
    }

    /// Query rows of the operation.
    pub fn all_rows(&self) -> usize {
        self.unit_rows * self.groups * self.streams
    }

    /// The source of row `row` of tile `tile` (counted over all units).
    pub fn place(&self, tile: usize, row: usize) -> Place {
        let (unit, row) = (tile / self.tiles, tile % self.tiles * self.tile_rows + row);
        let (stream, group) = (unit / self.groups, unit % self.groups);
        Place { query: row / self.group, head: group * self.group + row % self.group, stream }
    }

    /// Rows of tile `tile` (counted over all units).
    pub fn rows(&self, tile: usize) -> usize {
        (self.unit_rows - tile % self.tiles * self.tile_rows).min(self.tile_rows)
    }

    /// f32 values of a row's sums.
    pub fn dv_padded(&self) -> usize {
        self.dv.next_multiple_of(LANES)
    }

    /// Where a row's partial result lies, in f32: its sums, then maximum and sum of weights.
    pub fn slot(&self, tile: usize, chunk: usize, row: usize) -> usize {
        ((tile * self.chunks + chunk) * self.tile_rows + row) * self.slot_len()
    }

    fn slot_len(&self) -> usize {
        self.dv_padded() + LANES
    }

    /// What AMX needs room for.
    pub fn amx_room(&self) -> Room {
        let lanes = self.tile_rows.next_multiple_of(LANES);
        Room { lanes, queries: lanes * self.bundle, d: self.d, dv: self.dv }
    }

    /// Bytes of all partial results.
    pub fn partial_bytes(&self) -> usize {
        if self.chunks == 1 {
            return 0;
        }
        self.items() * self.tile_rows * self.slot_len() * 4
    }

    /// f32 values of a thread's scratch: K block, V block, panels, scores, sums, panel states, what AMX needs.
    pub fn thread_parts(&self) -> [usize; 7] {
        let Room { lanes, queries: all, .. } = self.amx_room();
        let v = if self.shared { 0 } else { block_len(self.block, self.dv) };
        let states = MAX_PANELS * size_of::<State>() / 4;
        // AMX adds to 16 rows at a time.
        let sums = all * self.dv_padded();
        let tiles = TileAttention::scratch_len(self.amx_room());
        let k = if self.shared { self.block } else { LANES };
        [block_len(k, self.d), v, all * self.d.next_multiple_of(LANES), lanes * self.block, sums, states, tiles]
    }

    /// Bytes of a thread's scratch on any CPU; two lines more keep neighbours apart.
    pub fn thread_bytes(&self) -> usize {
        self.on_tiles().thread_parts().iter().sum::<usize>() * 4 + 128
    }
}

/// Most tiles of one stream, of its `groups`, that are taken together in blocks of `block` positions.
fn bundle(p: &Params<'_>, groups: usize, block: usize) -> usize {
    let row = |t: &View<'_>| t.dtype.row_bytes(t.ne[0]);
    let beside = |t: &View<'_>| t.ne[2] == groups && t.nb[2] == row(t) && t.nb[1] >= t.nb[2] * groups;
    if !(beside(&p.k) && beside(&p.v)) {
        return 1;
    }
    groups.min(MAX_BUNDLE).min(BUNDLE_BYTES / (block * (row(&p.k) + row(&p.v)))).max(1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
