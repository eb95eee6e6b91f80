//! What people see of an object: its parts as a tree of steps, each with a state and a sentence. The status page and
//! `kubectl vmachine` render the same tree.

use serde::Serialize;

/// How far one step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum StepState {
    Ok,
    /// Nothing is wrong, and something else has to happen first.
    Waiting,
    Failed,
    /// It is not needed now, or nothing is known of it.
    Unknown,
}

impl StepState {
    /// One character, for readers and terminals that have no colors.
    pub fn symbol(self) -> char {
        match self {
            Self::Ok => '✓',
            Self::Waiting => '…',
            Self::Failed => '✗',
            Self::Unknown => '·',
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Waiting => "waiting",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// One object, and the objects that it consists of.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TreeStep {
    pub kind: &'static str,
    /// Empty if the object has no name yet.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub state: StepState,
    /// A sentence, or the phase of the object.
    pub summary: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<Fact>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<TreeStep>,
}

/// A property of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    pub label: &'static str,
    pub value: String,
}

impl TreeStep {
    pub fn new(kind: &'static str, name: impl Into<String>, state: StepState, summary: impl Into<String>) -> Self {
        Self { kind, name: name.into(), state, summary: summary.into(), facts: Vec::new(), steps: Vec::new() }
    }

    /// Adds a property. An empty one is left out.
    #[must_use]
    pub fn fact(mut self, label: &'static str, value: impl Into<String>) -> Self {
        let value = value.into();
        if !value.is_empty() {
            self.facts.push(Fact { label, value });
        }
        self
    }

    /// Changes state and sentence of every object of this kind and name, here and below.
    pub fn set_state(&mut self, kind: &str, name: &str, state: StepState, summary: &str) {
        if self.kind == kind && self.name == name {
            self.state = state;
            summary.clone_into(&mut self.summary);
        }
        for step in &mut self.steps {
            step.set_state(kind, name, state, summary);
        }
    }

    #[must_use]
    pub fn steps(mut self, steps: impl IntoIterator<Item = TreeStep>) -> Self {
        self.steps.extend(steps);
        self
    }
}

/// A time span in its two largest units, such as `45s`, `3m20s`, `5h` or `12d`. A negative one counts as zero.
pub fn age(seconds: i64) -> String {
    const UNITS: [(i64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")];
    let seconds = seconds.max(0);
    let Some(first) = UNITS.iter().position(|(unit, _)| seconds >= *unit) else { return "0s".to_owned() };
    let mut rest = seconds;
    let parts = UNITS.iter().skip(first).take(2).filter_map(|(unit, name)| {
        let count = rest / unit;
        rest %= unit;
        (count > 0).then(|| format!("{count}{name}"))
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_two_units_at_most() {
        for (seconds, expected) in [
            (-5, "0s"),
            (0, "0s"),
            (45, "45s"),
            (200, "3m20s"),
            (18_000, "5h"),
            (18_001, "5h"),
            (90_061, "1d1h"),
            (1_036_800, "12d"),
        ] {
            assert_eq!(age(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn an_empty_fact_is_left_out() {
        let step = TreeStep::new("Pod", "", StepState::Ok, "Running").fact("node", "").fact("address", "192.0.2.1");
        assert_eq!(step.facts, [Fact { label: "address", value: "192.0.2.1".to_owned() }]);
        let json = serde_json::to_value(&step).unwrap();
        assert_eq!((json.get("name"), json.get("steps"), &json["state"]), (None, None, &"ok".into()));
    }
}
