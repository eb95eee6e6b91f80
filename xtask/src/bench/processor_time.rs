//! CPU time of every program. On a machine with few processors, it shows which program an installation waits for; the
//! duration does not.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};
use vitivirt_lab::process_table;

/// By PID and start time of the process: the name of the program, and its CPU time in seconds.
pub(super) type ByProcess = HashMap<(u32, u64), (String, f64)>;

/// Reads every visible process. The lab has its own PID namespace, so these are the lab's processes.
pub(super) fn by_process() -> Result<ByProcess> {
    let ticks = sysconf(SysconfVar::CLK_TCK).context("reading the clock ticks per second")?.unwrap_or(100) as f64;
    let processes = std::fs::read_dir("/proc").context("reading /proc")?.flatten();
    Ok(processes
        .filter_map(|process| {
            let id = process.file_name().to_str()?.parse().ok()?;
            let process_info = process_table::find(id)?;
            Some(((id, process_info.started), (program(&process.path())?, process_info.cpu_time as f64 / ticks)))
        })
        .collect())
}

/// By program: the CPU time since `before`, of processes that still run.
pub(super) fn since(before: &ByProcess) -> Result<BTreeMap<String, f64>> {
    let mut sums = BTreeMap::new();
    for (id, (program, seconds)) in by_process()? {
        let earlier = before.get(&id).map_or(0.0, |(_, seconds)| *seconds);
        *sums.entry(program).or_default() += seconds - earlier;
    }
    Ok(sums)
}

/// The file name of the first word of the command line.
fn program(process: &Path) -> Option<String> {
    let command = std::fs::read(process.join("cmdline")).ok()?;
    let first = String::from_utf8_lossy(command.split(|byte| *byte == 0).next()?).into_owned();
    Some(Path::new(&first).file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_this_process_is_counted() {
        let before = by_process().unwrap();
        let this_process = (std::process::id(), process_table::find(std::process::id()).unwrap().started);
        let started = std::time::Instant::now();
        let mut number = 1_u64;
        while by_process().unwrap()[&this_process].1 - before[&this_process].1 < 0.02 {
            assert!(started.elapsed().as_secs() < 60, "the CPU time did not increase");
            number = std::hint::black_box(number.wrapping_mul(31));
        }
        let program = before[&this_process].0.clone();
        assert!(since(&before).unwrap()[&program] >= 0.02);
    }
}
