//! The command line that both programs share: common arguments, files of Kubernetes objects, the plan document,
//! printing of objects and warnings, and exit codes. The commands themselves are in the crates of the programs.
//!
//! An error in a file names the file, the object, the field and what to write instead. A field that the API server
//! would drop silently causes a warning.

mod arguments;
mod check;
mod command_error;
mod completions;
mod manifest_files;
mod output;
mod plan;
mod schema_check;
mod setting;
mod tree;
mod version;

pub use arguments::{
    ClusterArguments, EXIT_STATUS, FileArguments, PlanOutput, RENDER_EXIT_STATUS, RenderOutput, overlong_help,
};
pub use check::{
    CHECK_EXIT_STATUS, Check, CheckArguments, CheckReport, CheckStatus, check_lease, check_permissions,
    check_server_version,
};
pub use command_error::{CommandError, CommandResult, OrInvalid, exit_code};
pub use completions::CompletionsArguments;
pub use manifest_files::{Document, parse_manifests, read_manifests};
pub use output::{ObjectFormat, ignore_broken_pipe, print, print_objects, print_warnings, to_yaml, write_objects};
pub use plan::{
    ChangeEffect, KeptObject, PLAN_FORMAT, PlanDocument, PlanFormat, PlanResult, PlannedChange, PlannedObject,
    PlannedRestart, PlannedRollout, PlannedVm, PlannedWrite, RefusedField, VmEffect, WriteAction,
};
pub use schema_check::check_schema;
pub use setting::{DurationParser, Setting, SettingParser, namespace_name, optional_namespace, setting};
pub use tree::{table_text, tree_text};
pub use version::version;
