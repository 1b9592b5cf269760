//! From instruction bytes to what they mean.
//!
//! All AMX instructions here are `VEX.128.0F38.W0`, so they need the three-byte prefix C4: C5 can only reach
//! map 0F. A form that the SDM does not define decodes to nothing, as does any other instruction.

use crate::stats::Op;

/// A decoded instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Insn {
    pub op: Op,
    /// Bytes it takes.
    pub len: u8,
    pub operands: Operands,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operands {
    None,
    /// The 64 bytes of a configuration.
    Config(Address),
    /// `TILEZERO`.
    Tile(u8),
    /// Load and store. The index register is the stride.
    Rows {
        tile: u8,
        at: Address,
    },
    /// A dot product. Numbers above 7 can be encoded and are for the executor to refuse.
    Dot {
        dst: u8,
        a: u8,
        b: u8,
    },
}

/// A memory operand: `seg:[base + index * 2^scale + disp]`. Registers by their number, rax = 0 to r15 = 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub base: Base,
    pub index: Option<u8>,
    pub scale: u8,
    pub disp: i32,
    pub segment: Segment,
    /// Prefix 67h: the effective address is cut to 32 bits.
    pub short: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    None,
    Reg(u8),
    /// The address of the next instruction.
    Rip,
}

/// Segments that have a base in 64-bit mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    Flat,
    Fs,
    Gs,
}

/// The longest instruction the processor takes.
pub(crate) const MAX_LEN: u8 = 15;

/// Reads bytes one by one, so that nothing past the instruction is touched: it may end a page.
struct Bytes<F> {
    next: F,
    taken: u8,
}

impl<F: FnMut(usize) -> Option<u8>> Bytes<F> {
    fn u8(&mut self) -> Option<u8> {
        if self.taken == MAX_LEN {
            return None;
        }
        let byte = (self.next)(self.taken.into())?;
        self.taken += 1;
        Some(byte)
    }

    fn i32(&mut self) -> Option<i32> {
        Some(i32::from_le_bytes([self.u8()?, self.u8()?, self.u8()?, self.u8()?]))
    }
}

/// The fields of a three-byte VEX prefix, inverted bits put right.
struct Vex {
    r: u8,
    x: u8,
    b: u8,
    vvvv: u8,
    pp: u8,
}

/// Decodes the instruction whose `i`-th byte is `byte(i)`. `None`: not an AMX instruction in a defined form.
pub(crate) fn decode(byte: impl FnMut(usize) -> Option<u8>) -> Option<Insn> {
    let mut bytes = Bytes { next: byte, taken: 0 };
    let mut segment = Segment::Flat;
    let mut short = false;
    loop {
        match bytes.u8()? {
            0x26 | 0x2e | 0x36 | 0x3e => {} // es, cs, ss, ds: no meaning in 64-bit mode, and fs or gs stays
            0x64 => segment = Segment::Fs,
            0x65 => segment = Segment::Gs,
            0x67 => short = true,
            0xc4 => break,
            _ => return None, // 66, F2, F3, lock and REX before VEX are #UD too
        }
    }
    let vex = vex(&mut bytes)?;
    let opcode = bytes.u8()?;
    let modrm = bytes.u8()?;
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    let (op, operands) = if mode == 3 {
        registers(opcode, &vex, reg, rm)?
    } else {
        let op = memory_op(opcode, &vex, reg, rm)?;
        let at = address(&mut bytes, &vex, mode, rm, segment, short)?;
        let tile = vex.r << 3 | reg;
        (op, if opcode == 0x49 { Operands::Config(at) } else { Operands::Rows { tile, at } })
    };
    Some(Insn { op, len: bytes.taken, operands })
}

/// The two bytes after C4. `None` unless the map is 0F38, W is 0 and L is 0.
fn vex<F: FnMut(usize) -> Option<u8>>(bytes: &mut Bytes<F>) -> Option<Vex> {
    let (p1, p2) = (bytes.u8()?, bytes.u8()?);
    let (map, w, l) = (p1 & 0x1f, p2 >> 7, p2 >> 2 & 1);
    let inverted = !p1;
    (map == 2 && w == 0 && l == 0).then_some(Vex {
        r: inverted >> 7,
        x: inverted >> 6 & 1,
        b: inverted >> 5 & 1,
        vvvv: !p2 >> 3 & 0xf,
        pp: p2 & 3,
    })
}

/// Forms with a register in r/m. Mandatory prefixes `pp`: 0 none, 1 66, 2 F3, 3 F2.
fn registers(opcode: u8, vex: &Vex, reg: u8, rm: u8) -> Option<(Op, Operands)> {
    let op = match (opcode, vex.pp) {
        (0x49, 0) if reg == 0 && rm == 0 && vex.vvvv == 0 => return Some((Op::Tilerelease, Operands::None)),
        (0x49, 3) if rm == 0 && vex.vvvv == 0 => return Some((Op::Tilezero, Operands::Tile(vex.r << 3 | reg))),
        (0x5c, 2) => Op::Tdpbf16ps,
        (0x5c, 3) => Op::Tdpfp16ps,
        (0x5e, 0) => Op::Tdpbuud,
        (0x5e, 1) => Op::Tdpbusd,
        (0x5e, 2) => Op::Tdpbsud,
        (0x5e, 3) => Op::Tdpbssd,
        _ => return None,
    };
    Some((op, Operands::Dot { dst: vex.r << 3 | reg, a: vex.b << 3 | rm, b: vex.vvvv }))
}

/// Forms with memory in r/m. `vvvv` is not used and must say so.
fn memory_op(opcode: u8, vex: &Vex, reg: u8, rm: u8) -> Option<Op> {
    let sib = rm == 4;
    match (opcode, vex.pp) {
        _ if vex.vvvv != 0 => None,
        (0x49, 0) if reg == 0 => Some(Op::Ldtilecfg),
        (0x49, 1) if reg == 0 => Some(Op::Sttilecfg),
        (0x4b, 1) if sib => Some(Op::Tileloaddt1),
        (0x4b, 2) if sib => Some(Op::Tilestored),
        (0x4b, 3) if sib => Some(Op::Tileloadd),
        _ => None,
    }
}

/// SIB byte and displacement of a memory operand.
fn address<F: FnMut(usize) -> Option<u8>>(
    bytes: &mut Bytes<F>,
    vex: &Vex,
    mode: u8,
    rm: u8,
    segment: Segment,
    short: bool,
) -> Option<Address> {
    let mut at = Address { base: Base::Reg(vex.b << 3 | rm), index: None, scale: 0, disp: 0, segment, short };
    let mut wide = mode == 2;
    if rm == 4 {
        let sib = bytes.u8()?;
        let (index, base) = (vex.x << 3 | (sib >> 3 & 7), sib & 7);
        at.scale = sib >> 6;
        at.index = (index != 4).then_some(index); // 4 is "none"; r12 (12) can be an index
        at.base = Base::Reg(vex.b << 3 | base);
        if mode == 0 && base == 5 {
            (at.base, wide) = (Base::None, true);
        }
    } else if mode == 0 && rm == 5 {
        (at.base, wide) = (Base::Rip, true);
    }
    if wide {
        at.disp = bytes.i32()?;
    } else if mode == 1 {
        at.disp = i32::from(bytes.u8()? as i8);
    }
    Some(at)
}

#[cfg(test)]
mod tests;
