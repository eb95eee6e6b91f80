//! Conditions that stay byte for byte equal while nothing changes.
//!
//! The transition time is an argument and is used only when the status of a condition changes. A comparison of two
//! status values is therefore enough to decide whether a write is needed.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

/// Kubernetes allows 32768 characters in a condition's message. Text from a server or a guest is cut much earlier.
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

/// Sets the condition of one type and keeps the order of the list. Returns whether anything but a time changed.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    type_: &str,
    status: ConditionStatus,
    reason: &str,
    message: &str,
    observed_generation: Option<i64>,
    now: Timestamp,
) -> bool {
    let mut desired = Condition {
        type_: type_.to_owned(),
        status: status.as_str().to_owned(),
        reason: reason.to_owned(),
        message: crate::text::truncate(message, MESSAGE_LIMIT).into_owned(),
        observed_generation,
        last_transition_time: Time(now),
    };
    let Some(current) = conditions.iter_mut().find(|condition| condition.type_ == type_) else {
        conditions.push(desired);
        return true;
    };
    if current.status == desired.status {
        desired.last_transition_time = current.last_transition_time.clone();
    }
    let changed = *current != desired;
    *current = desired;
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn the_transition_time_changes_only_with_the_status() {
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
    fn a_long_message_is_cut_at_a_character_boundary() {
        let mut list = Vec::new();
        let long = "ø".repeat(MESSAGE_LIMIT);
        set_condition(&mut list, "Ready", ConditionStatus::Unknown, "Long", &long, None, at(0));
        assert!(list[0].message.len() <= MESSAGE_LIMIT && list[0].message.ends_with("ø…"));
    }
}
