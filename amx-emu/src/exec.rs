//! Carries out a decoded instruction with the registers and memory of the interrupted program.

use crate::decode::{Address, Base, Insn, Operands, Segment};
use crate::stats::Op;
use crate::sys;
use crate::tiles::{Dot, Fault, Tiles};

/// The general registers of the interrupted program.
pub(crate) trait Registers {
    /// By number: rax = 0, rcx = 1, rdx = 2, rbx = 3, rsp = 4, rbp = 5, rsi = 6, rdi = 7, r8 to r15.
    fn get(&self, number: u8) -> u64;
    /// Address of the instruction.
    fn rip(&self) -> u64;
}

/// Why an instruction did not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trap {
    Fault(Fault),
    /// Its memory access faulted; the signal handlers know how.
    Memory,
}

impl From<Fault> for Trap {
    fn from(fault: Fault) -> Self {
        Trap::Fault(fault)
    }
}

/// Runs one instruction. On `Err` the state is as the processor would leave it, and the instruction can be
/// run again.
///
/// # Safety
/// The memory that the instruction names must be the interrupted program's to read or write.
pub(crate) unsafe fn execute(tiles: &mut Tiles, insn: &Insn, regs: &impl Registers) -> Result<(), Trap> {
    match insn.operands {
        Operands::None => tiles.release(),
        Operands::Tile(tile) => tiles.zero(tile)?,
        Operands::Dot { dst, a, b } => tiles.dot(dot(insn.op), dst, a, b)?,
        Operands::Config(at) => {
            let at = linear(&at, insn, regs, true, 0);
            // SAFETY: the caller's promise.
            unsafe { config(tiles, insn.op, at) }?;
        }
        Operands::Rows { tile, at } => {
            // The index is a stride here. A missing one is a stride of zero.
            let stride = at.index.map_or(0, |i| regs.get(i) << at.scale);
            let row_at = |row: usize| linear(&at, insn, regs, false, (row as u64).wrapping_mul(stride));
            let done = if insn.op == Op::Tilestored {
                // SAFETY: the caller's promise for memory; the row is ours.
                tiles.try_store(tile, |row, bytes| unsafe {
                    sys::copy(row_at(row) as *mut u8, bytes.as_ptr(), 0, bytes.len()) == 0
                })?
            } else {
                // SAFETY: as above.
                tiles.try_load(tile, |row, out| unsafe {
                    sys::copy(out.as_mut_ptr(), row_at(row) as *const u8, 0, out.len()) == 0
                })?
            };
            if !done {
                return Err(Trap::Memory);
            }
        }
    }
    Ok(())
}

/// `LDTILECFG` and `STTILECFG`.
///
/// # Safety
/// As [`execute`].
unsafe fn config(tiles: &mut Tiles, op: Op, at: u64) -> Result<(), Trap> {
    let mut bytes = [0; 64];
    if op == Op::Sttilecfg {
        bytes = tiles.store_config();
    }
    // SAFETY: `bytes` has 64 bytes; the caller vouches for the other side.
    let failed = unsafe {
        if op == Op::Sttilecfg {
            sys::copy(at as *mut u8, bytes.as_ptr(), 0, 64)
        } else {
            sys::copy(bytes.as_mut_ptr(), at as *const u8, 0, 64)
        }
    };
    if failed != 0 {
        return Err(Trap::Memory);
    }
    if op == Op::Ldtilecfg {
        tiles.load_config(&bytes)?;
    }
    Ok(())
}

/// The linear address of a memory operand, plus `offset`. `indexed`: the index is part of the address.
fn linear(at: &Address, insn: &Insn, regs: &impl Registers, indexed: bool, offset: u64) -> u64 {
    let base = match at.base {
        Base::None => 0,
        Base::Reg(number) => regs.get(number),
        Base::Rip => regs.rip().wrapping_add(insn.len.into()),
    };
    let index = at.index.filter(|_| indexed).map_or(0, |i| regs.get(i) << at.scale);
    let mut effective = base.wrapping_add(index).wrapping_add(at.disp as i64 as u64).wrapping_add(offset);
    if at.short {
        effective &= 0xffff_ffff;
    }
    let segment = match at.segment {
        Segment::Flat => 0,
        Segment::Fs => sys::segment_base(0x1003),
        Segment::Gs => sys::segment_base(0x1004),
    };
    segment.wrapping_add(effective)
}

/// The dot product that an instruction names.
fn dot(op: Op) -> Dot {
    match op {
        Op::Tdpbf16ps => Dot::Bf16,
        Op::Tdpfp16ps => Dot::Fp16,
        Op::Tdpbsud => Dot::SignedUnsigned,
        Op::Tdpbusd => Dot::UnsignedSigned,
        Op::Tdpbuud => Dot::UnsignedUnsigned,
        _ => Dot::SignedSigned,
    }
}
