//! Conditions that do not change when nothing changed.
//!
//! The time of a transition is an argument and is used only when the status of a condition flips. Everything else
//! about an unchanged condition stays byte for byte, so comparing two status values is enough to know whether a
//! write would say anything new.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

/// Kubernetes allows 32768 characters in a condition's message; what a server or a guest says is cut long before.
const MESSAGE_LIMIT: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    True,
    False,
    Unknown,
}

impl ConditionStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<bool> for ConditionStatus {
    fn from(value: bool) -> Self {
        if value { Self::True } else { Self::False }
    }
}

/// Sets one condition by its type and keeps the list's order. Returns whether anything but a time changed.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    type_: &str,
    status: ConditionStatus,
    reason: &str,
    message: &str,
    observed_generation: Option<i64>,
    now: Timestamp,
) -> bool {
    let mut wanted = Condition {
        type_: type_.to_owned(),
        status: status.as_str().to_owned(),
        reason: reason.to_owned(),
        message: crate::text::truncate(message, MESSAGE_LIMIT).into_owned(),
        observed_generation,
        last_transition_time: Time(now),
    };
    let Some(current) = conditions.iter_mut().find(|condition| condition.type_ == type_) else {
        conditions.push(wanted);
        return true;
    };
    if current.status == wanted.status {
        wanted.last_transition_time = current.last_transition_time.clone();
    }
    let changed = *current != wanted;
    *current = wanted;
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn time_moves_only_when_the_status_flips() {
        let mut list = Vec::new();
        assert!(set_condition(&mut list, "Ready", false.into(), "Waiting", "for a disk", Some(1), at(10)));
        assert!(!set_condition(&mut list, "Ready", false.into(), "Waiting", "for a disk", Some(1), at(20)));
        assert!(set_condition(&mut list, "Ready", false.into(), "Waiting", "for a network", Some(1), at(30)));
        assert_eq!(list[0].last_transition_time.0, at(10));
        assert!(set_condition(&mut list, "Ready", true.into(), "Running", "", Some(2), at(40)));
        assert_eq!(list[0].last_transition_time.0, at(40));
        assert_eq!(list.len(), 1);
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let mut list = Vec::new();
        let long = "ø".repeat(MESSAGE_LIMIT);
        set_condition(&mut list, "Ready", ConditionStatus::Unknown, "Long", &long, None, at(0));
        assert!(list[0].message.len() <= MESSAGE_LIMIT && list[0].message.ends_with("ø…"));
    }
}
