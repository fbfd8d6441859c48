//! The binary: the commands, and a global allocator that counts all heap bytes for the ledger.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use plimsoll_memory::heap::CountingHeap;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

fn main() -> ExitCode {
    plimsoll::main()
}
