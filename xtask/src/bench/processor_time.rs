//! How much every program has computed. On a machine where the cluster competes for two processors, this and not the
//! clock says whose work an installation waits for.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};
use vitivirt_lab::process_table;

/// By number and start of the process: the program's name, and the seconds it has computed.
pub(super) type ByProcess = HashMap<(u32, u64), (String, f64)>;

/// Of every process that can be seen: the lab has a process table of its own.
pub(super) fn by_process() -> Result<ByProcess> {
    let ticks = sysconf(SysconfVar::CLK_TCK).context("asking for the clock")?.unwrap_or(100) as f64;
    let processes = std::fs::read_dir("/proc").context("reading /proc")?.flatten();
    Ok(processes
        .filter_map(|process| {
            let id = process.file_name().to_str()?.parse().ok()?;
            let process_info = process_table::find(id)?;
            Some(((id, process_info.started), (program(&process.path())?, process_info.cpu_time as f64 / ticks)))
        })
        .collect())
}

/// By program: the seconds that were computed since, by processes that are still there.
pub(super) fn since(before: &ByProcess) -> Result<BTreeMap<String, f64>> {
    let mut sums = BTreeMap::new();
    for (id, (program, seconds)) in by_process()? {
        let earlier = before.get(&id).map_or(0.0, |(_, seconds)| *seconds);
        *sums.entry(program).or_default() += seconds - earlier;
    }
    Ok(sums)
}

/// The first word of the command line, without its folder.
fn program(process: &Path) -> Option<String> {
    let command = std::fs::read(process.join("cmdline")).ok()?;
    let first = String::from_utf8_lossy(command.split(|byte| *byte == 0).next()?).into_owned();
    Some(Path::new(&first).file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_process_computes_is_counted() {
        let before = by_process().unwrap();
        let own = (std::process::id(), process_table::find(std::process::id()).unwrap().started);
        let begun = std::time::Instant::now();
        let mut number = 1_u64;
        while by_process().unwrap()[&own].1 - before[&own].1 < 0.02 {
            assert!(begun.elapsed().as_secs() < 60, "nothing was counted");
            number = std::hint::black_box(number.wrapping_mul(31));
        }
        let program = before[&own].0.clone();
        assert!(since(&before).unwrap()[&program] >= 0.02);
    }
}
