//! The `main` of a test binary that uses labs.
//!
//! The standard test harness gives no chance to enter namespaces before its threads exist, so these binaries have a
//! `main` of their own; they take the same arguments and print the same lines. Tests may share a lab (starting one with
//! KubeVirtInstaller takes half a minute) or start their own. A lab that fails ends its tests at once with the cause, and its
//! logs are kept for reading.

use std::{path::Path, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Runtime, sync::OnceCell};

use crate::{
    KubeVirtInstaller, Lab, LabOptions,
    components::{self, ComponentGroup},
    isolate, paths,
};

/// No test of ours needs longer; a hanging one is an error with a name.
const TIMEOUT: Duration = Duration::from_secs(300);

tokio::task_local! {
    static TEST: &'static str;
}

/// The test in which this runs, if it is one.
pub(crate) fn current_test() -> Option<&'static str> {
    TEST.try_with(|test| *test).ok()
}

/// A test's future holds those of all that it awaits, a whole lab's start among them, and an unoptimized build copies
/// them on the stack: the usual 2 MiB are not enough for whichever test comes first.
const STACK: usize = 32 << 20;

/// The labs that tests share, each started by the first test that asks for it.
#[derive(Default)]
pub struct SharedLabs {
    plain: OnceCell<Arc<Lab>>,
    reference: OnceCell<Arc<Lab>>,
    ours: OnceCell<Arc<Lab>>,
}

impl SharedLabs {
    /// Kubernetes without KubeVirtInstaller.
    pub async fn plain(&self) -> Result<Arc<Lab>> {
        self.plain.get_or_try_init(|| start(KubeVirtInstaller::None)).await.cloned()
    }

    /// KubeVirtInstaller installed by its own operator, with the release's custom resource.
    pub async fn reference(&self) -> Result<Arc<Lab>> {
        self.reference.get_or_try_init(|| start(KubeVirtInstaller::Reference { custom_resource: None })).await.cloned()
    }

    /// The same, installed by our operator from this file.
    pub async fn ours(&self, program: &Path) -> Result<Arc<Lab>> {
        let ours = || KubeVirtInstaller::Ours { program: program.to_owned(), custom_resource: None };
        self.ours.get_or_try_init(|| start(ours())).await.cloned()
    }

    fn started(&self) -> impl Iterator<Item = &Arc<Lab>> {
        [&self.plain, &self.reference, &self.ours].into_iter().filter_map(OnceCell::get)
    }

    /// Resolves when a shared lab that has been started fails.
    async fn failed(&self) -> anyhow::Error {
        loop {
            let labs: Vec<_> = self.started().cloned().collect();
            let failures = labs.iter().map(|lab| Box::pin(lab.health().failed()));
            let again = tokio::time::sleep(Duration::from_millis(500));
            if labs.is_empty() {
                again.await;
                continue;
            }
            tokio::select! {
                (failure, ..) = futures::future::select_all(failures) => return failure,
                () = again => {}
            }
        }
    }
}

async fn start(kubevirt: KubeVirtInstaller) -> Result<Arc<Lab>> {
    Lab::start(LabOptions { kubevirt, ..LabOptions::default() }).await.map(Arc::new)
}

/// Collects tests and runs them.
pub struct Suite {
    runtime: Arc<Runtime>,
    labs: Arc<SharedLabs>,
    trials: Vec<Trial>,
}

impl Suite {
    fn new() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_stack_size(STACK)
            .enable_all()
            .build()
            .context("starting tokio")?;
        Ok(Suite { runtime: Arc::new(runtime), labs: Arc::default(), trials: Vec::new() })
    }

    /// Adds a test. It fails with an error or a panic.
    pub fn test<T>(&mut self, name: &'static str, test: impl FnOnce(Arc<SharedLabs>) -> T + Send + 'static)
    where
        T: Future<Output = Result<()>> + Send + 'static,
    {
        let (runtime, labs) = (self.runtime.clone(), self.labs.clone());
        self.trials.push(Trial::test(name, move || {
            let task = runtime.spawn({
                let labs = labs.clone();
                async move {
                    tokio::select! {
                        result = TEST.scope(name, test(labs.clone())) => result,
                        failure = labs.failed() => Err(failure),
                        () = tokio::time::sleep(TIMEOUT) => Err(anyhow!("not done within {TIMEOUT:?}")),
                    }
                }
            });
            let result = runtime.block_on(task).unwrap_or_else(|panic| Err(anyhow!("{}", message(panic))));
            let result = result.map_err(|error| {
                let logs = keep_logs(name).unwrap_or_else(|error| format!("no logs kept: {error:#}"));
                Failed::from(format!("{error:#}\n{logs}"))
            });
            // What the test's own labs left is on disk by now, or of no interest.
            let _ = paths::stopped_labs_dir(name).map(std::fs::remove_dir_all);
            result
        }));
    }
}

/// Adds test functions to a [`Suite`] under their own names: `tests!(suite; first_test, second_test)`. Each is an
/// `async fn(Arc<SharedLabs>) -> anyhow::Result<()>`.
#[macro_export]
macro_rules! tests {
    ($suite:expr; $($test:ident),+ $(,)?) => {
        $($suite.test(stringify!($test), $test);)+
    };
}

fn message(panic: tokio::task::JoinError) -> String {
    match panic.try_into_panic() {
        Ok(panic) => panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "it panicked".to_owned()),
        Err(error) => error.to_string(),
    }
}

/// Copies what the labs wrote to disk, those that run and those that the test has ended: their own place vanishes.
fn keep_logs(test: &str) -> Result<String> {
    let kept = paths::failures_dir()?.join(test);
    let _ = std::fs::remove_dir_all(&kept);
    for folder in [paths::run_dir()?, paths::stopped_labs_dir(test)?] {
        for lab in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if lab.path().join("logs").is_dir() {
                copy_logs(&lab.path(), &kept.join(lab.file_name()))?;
            }
        }
    }
    Ok(format!("the labs' logs are kept in {}", kept.display()))
}

pub(crate) fn copy_logs(lab: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    let logs = std::fs::read_dir(lab.join("logs")).into_iter().flatten().flatten().map(|file| file.path());
    for file in logs.chain([lab.join("audit.log")]).filter(|file| file.is_file()) {
        std::fs::copy(&file, to.join(file.file_name().unwrap_or_default())).context("copying a log")?;
    }
    Ok(())
}

/// Runs the tests that `fill` adds, inside namespaces of their own.
pub fn main(groups: &[ComponentGroup], fill: impl FnOnce(&mut Suite)) -> ExitCode {
    if let Err(error) = isolate::begin() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let arguments = Arguments::from_args();
    isolate::run(
        // Listing tests needs no lab.
        || if arguments.list { Ok(()) } else { components::ensure(groups) },
        || {
            let mut suite = Suite::new()?;
            fill(&mut suite);
            let conclusion = libtest_mimic::run(&arguments, std::mem::take(&mut suite.trials));
            Ok(conclusion.exit_code())
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lab_can_know_its_test() {
        assert_eq!(current_test(), None);
        assert_eq!(TEST.scope("mine", async { current_test() }).await, Some("mine"));
    }
}
