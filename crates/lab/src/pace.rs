//! How fast the simulated parts of a lab are. A lab that does everything at once hides what real clusters do: a pod that
//! is ready before its port is open, endpoints that lag, guests that boot for seconds.
//!
//! A [`Pace`] sets all delays of a lab; each of them is also a field of [`LabOptions`]. A delay is chosen from a
//! [`DelayRange`] by the lab's seed and the object that is delayed, so two labs with the same seed delay alike.

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::{GuestBehaviour, LabOptions, PodBehaviour};

/// The shortest and the longest delay. Each object gets its own delay in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayRange {
    pub from: Duration,
    pub to: Duration,
}

impl DelayRange {
    pub const NONE: DelayRange = DelayRange::millis(0, 0);

    pub const fn millis(from: u64, to: u64) -> Self {
        DelayRange { from: Duration::from_millis(from), to: Duration::from_millis(to) }
    }

    /// The delay of one object. It depends on the arguments only.
    pub(crate) fn pick(self, seed: u64, what: &str, object: &str) -> Duration {
        let digest: [u8; 32] = Sha256::digest(format!("{seed}/{what}/{object}")).into();
        let fraction = f64::from(u16::from_le_bytes([digest[0], digest[1]])) / f64::from(u16::MAX);
        self.from + self.to.saturating_sub(self.from).mul_f64(fraction)
    }
}

/// The same delay for every object.
impl From<Duration> for DelayRange {
    fn from(delay: Duration) -> Self {
        DelayRange { from: delay, to: delay }
    }
}

/// A set of delays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// No delays.
    #[default]
    Instant,
    /// The delays of a fast cluster: pods report that they are ready up to 3 s before they listen, endpoints and PVCs
    /// lag by 1 s, guests need 0.5 to 2 s per state.
    Quick,
    /// The delays of an ordinary cluster: as `Quick`, and pods need 5 to 20 s, guests 0.5 to 10 s per state, and the
    /// kubelet updates mounted Secrets and ConfigMaps after 60 to 90 s.
    Real,
}

impl Pace {
    fn pods(self) -> PodBehaviour {
        // A process listens up to 1 s after its start.
        let starts_after_ready = DelayRange::millis(0, 2_000);
        match self {
            Pace::Instant => PodBehaviour::default(),
            Pace::Quick => PodBehaviour { starts_after_ready, ..PodBehaviour::default() },
            Pace::Real => PodBehaviour {
                starts_after_ready,
                ready_after: DelayRange::millis(5_000, 20_000),
                volumes_updated_after: DelayRange::millis(60_000, 90_000),
                ..PodBehaviour::default()
            },
        }
    }

    fn guests(self) -> GuestBehaviour {
        let delay = match self {
            Pace::Instant => DelayRange::NONE,
            Pace::Quick => DelayRange::millis(500, 2_000),
            Pace::Real => DelayRange::millis(500, 10_000),
        };
        GuestBehaviour {
            boots_after: delay,
            addresses_after: delay,
            stops_after: delay,
            migration_takes: delay,
            ..GuestBehaviour::default()
        }
    }
}

impl LabOptions {
    /// The default options, with the delays of this pace.
    pub fn at(pace: Pace) -> Self {
        let lag = match pace {
            Pace::Instant => Duration::ZERO,
            Pace::Quick | Pace::Real => Duration::from_secs(1),
        };
        LabOptions {
            pods: pace.pods(),
            guests: pace.guests(),
            endpoints_lag: lag,
            pvcs_bind_after: lag.into(),
            ..LabOptions::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_and_the_object_determine_the_delay() {
        let range = DelayRange::millis(5_000, 20_000);
        let delays = |seed| -> Vec<Duration> {
            (0..20).map(|number| range.pick(seed, "ready", &format!("virt-api/{number}"))).collect()
        };
        assert_eq!(delays(1), delays(1));
        assert_ne!(delays(1), delays(2));
        assert!(delays(1).iter().all(|delay| (range.from..=range.to).contains(delay)), "{:?}", delays(1));
        let (shortest, longest) = (delays(1).into_iter().min().unwrap(), delays(1).into_iter().max().unwrap());
        assert!(
            longest - shortest > Duration::from_secs(5),
            "the delays must use the range: {shortest:?} to {longest:?}"
        );
        assert_eq!(DelayRange::from(Duration::from_secs(7)).pick(1, "ready", "x"), Duration::from_secs(7));
    }

    #[test]
    fn an_instant_lab_has_no_delays() {
        let options = LabOptions::at(Pace::Instant);
        assert_eq!((options.endpoints_lag, options.pvcs_bind_after), (Duration::ZERO, DelayRange::NONE));
        assert_eq!((options.pods.ready_after, options.guests.boots_after), (DelayRange::NONE, DelayRange::NONE));
    }
}
