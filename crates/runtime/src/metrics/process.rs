//! The metrics of the process, under the names that every Prometheus client library uses. They are read from `/proc` when
//! they are scraped.

use std::{fmt, fs};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

/// The unit of times in `/proc`, which Linux fixes for user space.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Debug)]
pub(super) struct ProcessCollector;

#[derive(Debug, Default, PartialEq)]
struct ProcessState {
    cpu_seconds: Option<f64>,
    start_time_seconds: Option<f64>,
    resident_bytes: Option<i64>,
    virtual_bytes: Option<i64>,
    open_files: Option<i64>,
    max_files: Option<i64>,
}

impl ProcessState {
    fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let open_files = fs::read_dir("/proc/self/fd").ok().and_then(|entries| i64::try_from(entries.count()).ok());
        Self {
            open_files,
            ..Self::parse(
                &text("/proc/self/stat"),
                &text("/proc/self/status"),
                &text("/proc/self/limits"),
                &text("/proc/stat"),
            )
        }
    }

    fn parse(stat: &str, status: &str, limits: &str, system: &str) -> Self {
        // The second field is the name of the program in parentheses, which may contain spaces.
        let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let ticks = |n: usize| Some(fields.get(n)?.parse::<f64>().ok()? / TICKS_PER_SECOND);
        let kilobytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim().strip_suffix(" kB")?.parse::<i64>().ok()? * 1024)
        };
        let boot = system.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<f64>().ok());
        let max_files = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
        Self {
            cpu_seconds: ticks(11).zip(ticks(12)).map(|(user, system)| user + system),
            start_time_seconds: boot.zip(ticks(19)).map(|(boot, since)| boot + since),
            resident_bytes: kilobytes("VmRSS:"),
            virtual_bytes: kilobytes("VmSize:"),
            open_files: None,
            max_files: max_files.and_then(|line| line.split_whitespace().next()?.parse().ok()),
        }
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let state = ProcessState::read();
        let mut encode = |name: &str, help: &str, metric: Option<&dyn EncodeMetric>| match metric {
            Some(metric) => metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?),
            None => Ok(()),
        };
        let cpu = state.cpu_seconds.map(ConstCounter::new);
        let start = state.start_time_seconds.map(ConstGauge::new);
        let [resident, size, open, max] =
            [state.resident_bytes, state.virtual_bytes, state.open_files, state.max_files]
                .map(|it| it.map(ConstGauge::new));
        encode("process_cpu_seconds", "CPU time of the process", cpu.as_ref().map(|it| it as _))?;
        encode("process_start_time_seconds", "Start of the process, as Unix time", start.as_ref().map(|it| it as _))?;
        encode("process_resident_memory_bytes", "Resident memory of the process", resident.as_ref().map(|it| it as _))?;
        encode("process_virtual_memory_bytes", "Virtual memory of the process", size.as_ref().map(|it| it as _))?;
        encode("process_open_fds", "Open file descriptors of the process", open.as_ref().map(|it| it as _))?;
        encode("process_max_fds", "Limit of open file descriptors", max.as_ref().map(|it| it as _))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_the_kernel_are_parsed() {
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 3 0 12345 999 88 1";
        let status = "Name:\ta\nVmSize:\t    2048 kB\nVmRSS:\t     1024 kB\n";
        let limits =
            "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024         4096         files\n";
        let state = ProcessState::parse(stat, status, limits, "cpu 1 2\nbtime 1700000000\n");
        let expected = ProcessState {
            cpu_seconds: Some(2.0),
            start_time_seconds: Some(1_700_000_123.45),
            resident_bytes: Some(1024 * 1024),
            virtual_bytes: Some(2048 * 1024),
            open_files: None,
            max_files: Some(1024),
        };
        assert_eq!(state, expected);
        assert_eq!(ProcessState::parse("", "", "", ""), ProcessState::default());
    }

    #[test]
    fn this_process_has_every_metric() {
        let state = ProcessState::read();
        assert!(state.resident_bytes > Some(1 << 20) && state.open_files > Some(2), "{state:?}");
        assert!(state.cpu_seconds.is_some() && state.start_time_seconds > Some(1e9) && state.max_files.is_some());
    }
}
