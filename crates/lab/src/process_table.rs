//! Information about processes, read from `/proc`.

/// A process that has not exited: it runs, sleeps or is stopped. All times are in clock ticks of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    pub parent: u32,
    /// The start time. It distinguishes processes with a reused PID.
    pub started: u64,
    /// User and system time.
    pub cpu_time: u64,
}

/// None if there is no such process, or if it is a zombie.
pub fn find(pid: u32) -> Option<ProcessInfo> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses `pid (name) state parent …`. The name may contain any character. The 14th and 15th fields are user and system
/// time, the 22nd is the start time.
fn parse(stat: &str) -> Option<ProcessInfo> {
    let mut after_name = stat.rsplit(')').next()?.split_whitespace();
    let state = after_name.next()?;
    let parent = after_name.next()?.parse().ok()?;
    let user: u64 = after_name.nth(9)?.parse().ok()?;
    let system: u64 = after_name.next()?.parse().ok()?;
    let started = after_name.nth(6)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(ProcessInfo { parent, started, cpu_time: user + system })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "42 (odd) name) S 7 42 42 0 -1 4194560 1 0 0 0 150 50 9 9 20 0 1 0 123456 1 2 3";

    #[test]
    fn a_name_may_contain_parentheses_and_spaces() {
        assert_eq!(parse(STAT), Some(ProcessInfo { parent: 7, started: 123_456, cpu_time: 200 }));
    }

    #[test]
    fn an_incomplete_line_is_not_a_process() {
        assert_eq!(parse("7 (cut off) S 1"), None);
    }

    #[test]
    fn a_zombie_is_not_found() {
        assert_eq!(parse(&STAT.replace(") S ", ") Z ")), None);
    }

    #[test]
    fn this_process_is_found() {
        let this_process = find(std::process::id()).unwrap();
        assert_eq!(this_process.parent, std::os::unix::process::parent_id());
    }
}
