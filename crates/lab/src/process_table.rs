//! What the kernel says of a process, read from `/proc`.

/// A process that lives: it runs, sleeps or is stopped, and can still be signalled to some effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    pub parent: u32,
    /// In the kernel's clock ticks, as all of these: a number that is used again has another.
    pub started: u64,
    /// For itself, and the kernel for it.
    pub computed: u64,
}

/// None if there is no such process, or if it has ended and only waits to be reaped.
pub fn find(pid: u32) -> Option<ProcessInfo> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// `number (name) state parent …`, where the name may hold anything, the 14th and 15th field are the time that it computed
/// and the 22nd is the start.
fn parse(stat: &str) -> Option<ProcessInfo> {
    let mut after_name = stat.rsplit(')').next()?.split_whitespace();
    let state = after_name.next()?;
    let parent = after_name.next()?.parse().ok()?;
    let user: u64 = after_name.nth(9)?.parse().ok()?;
    let system: u64 = after_name.next()?.parse().ok()?;
    let started = after_name.nth(6)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(ProcessInfo { parent, started, computed: user + system })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "42 (odd) name) S 7 42 42 0 -1 4194560 1 0 0 0 150 50 9 9 20 0 1 0 123456 1 2 3";

    #[test]
    fn a_name_may_hold_parentheses_and_spaces() {
        assert_eq!(parse(STAT), Some(ProcessInfo { parent: 7, started: 123_456, computed: 200 }));
    }

    #[test]
    fn what_is_cut_off_is_no_process() {
        assert_eq!(parse("7 (cut off) S 1"), None);
    }

    #[test]
    fn who_waits_to_be_reaped_does_not_live() {
        assert_eq!(parse(&STAT.replace(") S ", ") Z ")), None);
    }

    #[test]
    fn this_process_lives() {
        let own = find(std::process::id()).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id());
    }
}
