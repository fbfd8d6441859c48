//! Checks of the machine and its limits: processor, memory, files, port, clock, other servers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use plimsoll_device::Isa;
use plimsoll_engine::{Host, PackedCache};
use plimsoll_memory::Bytes;
use plimsoll_memory::host::{HostNow, Overcommit, Remedy, Rlimits, Root};
use plimsoll_server::ServerConfig;
use plimsoll_tier::LargeFiles;

use super::Report;
use crate::args::DoctorArgs;
use crate::commands::checks::{open_to_all, try_address};
use crate::runtime::threads_are_had;

/// Descriptors that a server opens besides its connections, with room to spare: model files, logs, pipes, sockets that listen,
/// images that are fetched.
const OTHER_FILES: u64 = 64;

/// Time since 1970 before which no release was made: a clock that shows an earlier time is not set.
const RELEASED: Duration = Duration::from_secs(1_767_225_600);

/// Share of ten seconds, in percent, in which tasks may wait for memory on a machine that has enough.
const PRESSURE_PERCENT: f32 = 10.0;

/// The processes of one user that hold leases.
#[cfg(unix)]
pub type Holders = Vec<plimsoll_memory::host::lease::Holder>;

/// No leases: they need Unix file locks.
#[cfg(not(unix))]
pub type Holders = ();

/// Cores and instruction set.
pub fn processor(args: &DoctorArgs, host: &Host, report: &mut Report) {
    let cpus = host.limits.cpus;
    let quota = cpus.quota_millicores.map_or_else(String::new, |quota| {
        format!(", a quota of {}.{:03} cores among them", quota / 1000, quota % 1000)
    });
    let found = format!("{} usable of {} allowed{quota}; {} compute threads", cpus.usable, cpus.allowed, host.threads);
    match host.threads as u64 > cpus.usable {
        true => {
            report.note("cores", found, "--threads no greater than the usable cores: more of them wait for each other")
        }
        false => report.ok("cores", found),
    }
    match plimsoll_engine::gpus() {
        None => {}
        Some(gpus) if gpus.is_empty() => report.ok("gpus", "none was found"),
        Some(gpus) => report.ok("gpus", gpus.join("; ")),
    }
    let best = Isa::detect();
    match (args.engine.isa, best) {
        (Some(asked), _) if !asked.available() => {
            report.problem("instructions", format!("--isa {asked}, and this processor has {best}"), "leave --isa away");
        }
        (Some(asked), _) if asked < best => {
            report.note("instructions", format!("{asked}, as --isa says; this processor has {best}"), "leave --isa away");
        }
        (_, Isa::Amx) => report.ok("instructions", "amx: the fastest kernels there are here"),
        (_, Isa::Avx512) => {
            report.ok("instructions", "avx512 with VNNI: as exact as with AMX or more; prompts and batches take longer");
        }
        (_, Isa::Avx2) => {
            report.ok("instructions", "avx2: the same answers as with AVX-512; prompts take longer");
        }
        (_, Isa::Neon) => {
            report.ok("instructions", "neon: the same answers as on x86-64; its speed has not been measured");
        }
        (_, Isa::Portable) => report.note(
            "instructions",
            "portable code: the same answers, several times slower",
            "a processor with AVX2, FMA and F16C; in a virtual machine the host's own processor model (QEMU: -cpu host)",
        ),
    }
}

/// The directory of the prefix cache on disk: its room, and whether it is free.
pub fn disk_cache(args: &DoctorArgs, report: &mut Report) {
    let Some(dir) = &args.engine.disk.cache_dir else { return };
    // A missing directory is created below its first existing ancestor, so the disk of that ancestor counts.
    let there = dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(std::path::Path::new("."));
    let Some(free) = plimsoll_tier::free_bytes(there) else { return };
    let mut taken = 0;
    plimsoll_tier::Store::each(dir, &plimsoll_tier::System, |_, bytes, _| taken += bytes);
    let limit = args.engine.disk.cache_bytes;
    let found = format!("{} of at most {} taken, {} free on the disk", Bytes(taken), Bytes(limit), Bytes(free));
    match taken.saturating_add(free) < limit {
        true => report.note("disk cache", found, "--cache-bytes no larger than that, or a larger disk"),
        false => report.ok("disk cache", found),
    }
}

/// The directory of packed weights: its files, its limit and the free room.
pub fn packed_cache(args: &DoctorArgs, report: &mut Report) {
    let Some(PackedCache { dir, bytes: limit }) = args.engine.packed.options() else { return };
    if !dir.is_dir() {
        return report.ok("packed cache", format!("{} does not exist yet: the first start makes it", dir.display()));
    }
    match LargeFiles::open(&dir, limit, Box::new(plimsoll_tier::System)) {
        Err(error) => report.problem("packed cache", error.to_string(), "--packed-cache with a directory of your own"),
        Ok(files) => {
            let (mut count, mut taken) = (0, 0);
            files.each(|_, bytes, _| (count, taken) = (count + 1, taken + bytes));
            let free =
                plimsoll_tier::free_bytes(&dir).map_or_else(String::new, |free| format!(", {} free", Bytes(free)));
            report.ok("packed cache", format!("{count} models in {} of at most {}{free}", Bytes(taken), Bytes(limit)));
        }
    }
}

/// Memory, its limits, swap, overcommit and memory pressure.
pub fn memory(host: &Host, report: &mut Report) {
    let (limits, now) = (&host.limits, HostNow::read(&host.root, &host.limits));
    let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), |bytes| Bytes(bytes).to_string());
    report.ok("memory", format!("{} in all, {} available", bytes(limits.mem_total), bytes(now.machine_available)));
    let others = limits.sources.iter().filter(|source| !source.binding);
    let others: String = others.map(|source| format!("; {} of {}", source.name, Bytes(source.bytes))).collect();
    let limit = format!("{} ({}){others}", Bytes(host.limit.bytes), host.limit.source);
    match limits.binding().remedy {
        Remedy::AddressSpace => report.note(
            "memory limit",
            limit,
            "ulimit -v unlimited, and --memory-budget or a memory cgroup: address space also counts what is only mapped",
        ),
        _ => report.ok("memory limit", limit),
    }
    match limits.swap_limit.into_iter().chain(limits.swap_total).min() {
        Some(swap @ 1..) => report.note(
            "swap",
            format!(
                "{} within reach; it is no part of any plan, and a server that is swapped out stands still",
                Bytes(swap)
            ),
            "MemorySwapMax=0 in the unit, --memory-swap equal to --memory for a container, or swapoff",
        ),
        _ => report.ok("swap", "none within reach"),
    }
    let overcommit = Overcommit::read(&host.root);
    match overcommit.room() {
        None => report.ok("overcommit", "memory may be reserved before it is used"),
        Some(room) if room < host.limit.bytes => report.note(
            "overcommit",
            format!("strict: {} may still be reserved, less than the memory limit", Bytes(room)),
            format!("--memory-budget {room}, or sysctl vm.overcommit_memory=0"),
        ),
        Some(room) => report.ok("overcommit", format!("strict, and {} may still be reserved", Bytes(room))),
    }
    match now.psi {
        Some(psi) if psi.some_avg10 > PRESSURE_PERCENT => report.note(
            "pressure",
            format!("something waited for memory in {:.0} % of the last ten seconds", psi.some_avg10),
            "find the process that takes it: a server here would degrade at once",
        ),
        Some(psi) => report.ok("pressure", format!("{:.0} % of the last ten seconds", psi.some_avg10)),
        None => {}
    }
}

/// Descriptors for the connections that are allowed.
pub fn files(args: &DoctorArgs, report: &mut Report) {
    let connections = u64::from(args.http.max_connections);
    let needed = connections + OTHER_FILES;
    match Rlimits::read(&Root::system()).open_files {
        Some(limit) if limit < needed => report.problem(
            "files",
            format!("{limit} may be open; {connections} connections and what else is open may take {needed}"),
            match limit.checked_sub(OTHER_FILES).filter(|rest| *rest > 0) {
                Some(rest) => format!("ulimit -n {needed} (LimitNOFILE= in a unit), or --max-connections {rest}"),
                None => format!("ulimit -n {needed} (LimitNOFILE= in a unit)"),
            },
        ),
        Some(limit) => report.ok("files", format!("{limit} may be open; {connections} connections are allowed")),
        None => report.ok("files", format!("no limit; {connections} connections are allowed")),
    }
}

/// Threads of HTTP, tested by starting them for a moment.
pub fn threads(http: &ServerConfig, report: &mut Report) {
    let needed = http.threads_max();
    match threads_are_had(needed) {
        Ok(()) => report.ok("threads", format!("{needed} for HTTP are to be had")),
        Err(error) => report.problem(
            "threads",
            format!("HTTP takes up to {needed}, and the system refuses them: {error}"),
            "a higher ulimit -u (LimitNPROC= or TasksMax= in a unit, pids.max of the cgroup)",
        ),
    }
}

/// Tries to listen with the server's own socket, and checks whether clients on other machines need a key.
pub fn port(args: &DoctorArgs, http: &ServerConfig, report: &mut Report) -> anyhow::Result<()> {
    let config = ServerConfig { host: args.host.clone(), port: args.port, ..http.clone() };
    match try_address(&config) {
        Ok(()) => report.ok("port", format!("{} is free", config.address())),
        Err(error) => {
            report.problem("port", error.to_string(), "end what listens there, or give another --port or --host");
        }
    }
    if let Some(open) = open_to_all(&config) {
        report.note("access", open, "--api-key-file, or a router in front that asks for one");
    }
    Ok(())
}

/// Certificates, dates of answers and time limits need a clock that is set.
pub fn clock(report: &mut Report) {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(age) if age >= RELEASED => report.ok("clock", format!("{} seconds since 1970", age.as_secs())),
        _ => report.problem(
            "clock",
            "it shows a time before this program was written: certificates will be refused, answers wrongly dated",
            "set it (timedatectl set-ntp true)",
        ),
    }
}

/// Other servers of this user, and their planned bytes.
#[cfg(unix)]
pub fn others(report: &mut Report) -> Holders {
    use plimsoll_memory::host::lease::LeaseDir;
    match LeaseDir::of_user().and_then(|dir| dir.list()) {
        Ok(holders) if holders.is_empty() => {
            report.ok("neighbours", "no other Plimsoll of this user");
            holders
        }
        Ok(holders) => {
            let each: Vec<_> = holders
                .iter()
                .map(|holder| {
                    let gpu = holder.domains.iter().find(|domain| domain.starts_with("gpu "));
                    let of = gpu.map_or_else(String::new, |gpu| format!(" of {gpu}"));
                    format!("process {} plans {}{of}", holder.pid, Bytes(holder.planned))
                })
                .collect();
            report.ok("neighbours", each.join(", "));
            holders
        }
        Err(error) => {
            report.note(
                "neighbours",
                error.to_string(),
                "make that directory this user's own: until then two servers that start at once may count the same bytes",
            );
            Vec::new()
        }
    }
}

/// Reports nothing: without leases, other servers are not visible.
#[cfg(not(unix))]
pub fn others(_report: &mut Report) -> Holders {}
