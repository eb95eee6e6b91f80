//! The output of `plan` in both programs: what the operator would write for the objects of the input. Each program
//! fills the document from its own plan; this module prints it.
#![doc = include_str!("format.md")]

mod rollout;
#[cfg(test)]
mod tests;
mod text;

use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;
use vitivirt_api::Target;

use crate::{
    PlanOutput,
    output::{print, print_styled, yaml},
};

pub use rollout::{KeptObject, PlannedRestart, PlannedRollout, PlannedVm, VmEffect};

/// The documentation of the JSON and YAML form, in Markdown.
pub const PLAN_FORMAT: &str = include_str!("format.md");

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum PlanFormat {
    /// Human-readable text
    #[default]
    Text,
    /// One JSON document, for scripts
    Json,
    /// The same document as YAML
    Yaml,
}

#[derive(Debug, Default, PartialEq, Serialize)]
pub struct PlanDocument {
    pub objects: Vec<PlannedObject>,
    pub warnings: Vec<String>,
}

/// What would happen for one object of the input.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedObject {
    #[serde(flatten)]
    pub identity: ObjectIdentity,
    pub exists: bool,
    pub writes: Vec<PlannedWrite>,
    pub refused: Vec<RefusedField>,
    pub warnings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<PlannedRollout>,
    pub result: PlanResult,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectIdentity {
    api_version: String,
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    name: String,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct PlannedWrite {
    action: WriteAction,
    #[serde(flatten)]
    identity: ObjectIdentity,
    changes: Vec<PlannedChange>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum WriteAction {
    Create,
    Update,
    /// An update that restarts pods.
    Restart,
    Delete,
}

/// A field that differs in the written object.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedChange {
    pub field: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_field: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Value>,
    pub effect: ChangeEffect,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ChangeEffect {
    Live,
    LiveIfPossible,
    Restart,
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RefusedField {
    pub field: String,
    pub reason: String,
}

/// What the operator would report.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlanResult {
    pub error: bool,
    /// Whether the plan is incomplete, because something that decides about it is not known.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unknown: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl From<&Target> for ObjectIdentity {
    fn from(target: &Target) -> Self {
        Self {
            api_version: target.resource.api_version.clone(),
            kind: target.resource.kind.clone(),
            namespace: target.key.namespace().map(ToOwned::to_owned),
            name: target.key.name().to_owned(),
        }
    }
}

impl PlannedWrite {
    /// Drops the values of a Secret's fields, whatever the caller passes.
    pub fn new(action: WriteAction, target: &Target, mut changes: Vec<PlannedChange>) -> Self {
        let identity = ObjectIdentity::from(target);
        if identity.kind == "Secret" {
            for change in &mut changes {
                (change.from, change.to) = (None, None);
            }
        }
        Self { action, identity, changes }
    }

    pub fn action(&self) -> WriteAction {
        self.action
    }
}

impl PlanDocument {
    /// Whether something of the input cannot take effect.
    pub fn is_refused(&self) -> bool {
        let is_blocked =
            |object: &PlannedObject| object.rollout.as_ref().is_some_and(|rollout| !rollout.blockers.is_empty());
        self.objects.iter().any(|object| object.result.error || !object.refused.is_empty() || is_blocked(object))
    }

    /// 1 if something cannot take effect, 2 if that is not known.
    pub fn exit_code(&self) -> ExitCode {
        if self.is_refused() {
            ExitCode::FAILURE
        } else if self.objects.iter().any(|object| object.result.unknown) {
            ExitCode::from(2)
        } else {
            ExitCode::SUCCESS
        }
    }

    /// Prints the document to standard output.
    pub fn print(&self, output: &PlanOutput) -> Result<()> {
        let text = self.format(output.output)?;
        if output.output != PlanFormat::Text {
            return print(&text);
        }
        print_styled(&text, output.color_choice())
    }

    fn format(&self, format: PlanFormat) -> Result<String> {
        match format {
            PlanFormat::Text => Ok(text::render(self)),
            PlanFormat::Json => Ok(format!("{}\n", serde_json::to_string_pretty(self)?)),
            PlanFormat::Yaml => Ok(format!("{}\n", yaml(self)?)),
        }
    }
}
