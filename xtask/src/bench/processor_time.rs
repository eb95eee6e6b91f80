//! How much every program has computed. On a machine where the cluster competes for two processors, this and not the
//! clock says whose work an installation waits for.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};

/// By process: the program's name, and the seconds it has computed.
pub(super) type ByProcess = HashMap<String, (String, f64)>;

/// Of every process that can be seen: the lab has a process table of its own.
pub(super) fn by_process() -> Result<ByProcess> {
    let ticks = sysconf(SysconfVar::CLK_TCK).context("asking for the clock")?.unwrap_or(100) as f64;
    let processes = std::fs::read_dir("/proc").context("reading /proc")?.flatten();
    Ok(processes
        .filter_map(|process| {
            let stat = std::fs::read_to_string(process.path().join("stat")).ok()?;
            let id = process.file_name().into_string().ok()?;
            Some((id, (program(&process.path())?, ticks_of(&stat)? / ticks)))
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

/// User and system time of /proc/<pid>/stat: the fields after the name, which may itself contain blanks and brackets.
fn ticks_of(stat: &str) -> Option<f64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(11);
    let (user, system): (f64, f64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_s_name_may_contain_blanks_and_brackets() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 100 0 0 0 150 50 9 9 20 0 1 0 100 0 0";
        assert_eq!(ticks_of(stat), Some(200.0));
        assert_eq!(ticks_of("7 (cut off) S 1"), None);
    }

    #[test]
    fn what_this_process_computes_is_counted() {
        let before = by_process().unwrap();
        let own = std::process::id().to_string();
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
