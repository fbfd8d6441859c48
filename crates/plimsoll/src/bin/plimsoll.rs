//! The binary: a heap that is counted from the first byte, so that the ledger can say what it holds, and the commands.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use plimsoll_memory::heap::CountingHeap;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

fn main() -> ExitCode {
    plimsoll::main()
}
