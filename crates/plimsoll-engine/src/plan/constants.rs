//! Numbers that more than one module plans with.

use plimsoll_device::MediaRows;

/// The process before it holds anything of the plan: data touched, runtime, logging, threads that do not compute. 1.5 MiB of it is data
/// that the loader relocates, which grows with the program. Measured: 2.1 MiB at ready, 2.4 MiB under hostile schemas.
///
/// Builds for tests do not optimise the HTTP side: the program and its stack frames are larger. Measured: 4.3 MiB with many images.
pub(crate) const PROCESS_BASELINE_BYTES: u64 = if cfg!(debug_assertions) { 5 << 20 } else { 3 << 20 };
/// Bytes of freed memory that the system's allocator keeps: holes between live blocks. Measured: 0.6 MiB at ready, 2.8 MiB under the
/// attacks of `plimsoll soak`.
pub(crate) const HEAP_KEPT_BYTES: u64 = 4 << 20;
/// The emergency reserve. It is given back block by block when allocations are refused, so that the failure can be handled.
pub(crate) const EMERGENCY_RESERVE_BYTES: u64 = 16 << 20;

/// One row range of media without contents, for the planner and the self-test.
pub(crate) const ROWS_OF_MEDIA: [MediaRows<'static>; 1] = [MediaRows { first_row: 0, values: &[] }];
