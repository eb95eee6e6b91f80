//! The `main` of a test binary that uses labs.
//!
//! A process must enter namespaces before it has several threads, and the standard test harness does not allow that. So
//! these binaries have their own `main`, with the same arguments and output. Tests may share a lab (starting one with
//! KubeVirt takes half a minute) or start their own. If a lab fails, its tests fail immediately with the cause, and its
//! logs are kept.

use std::{
    collections::BTreeSet,
    path::Path,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Runtime, sync::OnceCell};

use crate::{
    KubeVirtInstaller, Lab, LabOptions, UsedPermission, audit,
    components::{self, ComponentGroup},
    isolate, paths,
};

/// Longer than any test of the test command needs, so that a hanging test fails.
const TIMEOUT: Duration = Duration::from_secs(300);
/// The environment variable with another limit in seconds, for tests that a campaign repeats many times.
pub const TIMEOUT_VARIABLE: &str = "LAB_TEST_TIMEOUT_SECONDS";

fn timeout() -> Result<Duration> {
    match std::env::var(TIMEOUT_VARIABLE) {
        Ok(seconds) => {
            let seconds = seconds.parse().with_context(|| format!("{TIMEOUT_VARIABLE} must be a number of seconds"))?;
            Ok(Duration::from_secs(seconds))
        }
        Err(_) => Ok(TIMEOUT),
    }
}

tokio::task_local! {
    static TEST: &'static str;
}

/// The name of the test that runs the current task, if it is a test.
pub(crate) fn current_test() -> Option<&'static str> {
    TEST.try_with(|test| *test).ok()
}

/// The future of a test contains the futures that it awaits, such as the start of a lab, and an unoptimized build
/// copies them on the stack: the default of 2 MiB is not enough.
const STACK: usize = 32 << 20;

/// The labs that tests share. The first test that needs a lab starts it.
#[derive(Default)]
pub struct SharedLabs {
    plain: OnceCell<Arc<Lab>>,
    reference: OnceCell<Arc<Lab>>,
    ours: OnceCell<Arc<Lab>>,
}

impl SharedLabs {
    /// Kubernetes without KubeVirt.
    pub async fn plain(&self) -> Result<Arc<Lab>> {
        self.plain.get_or_try_init(|| start(KubeVirtInstaller::None)).await.cloned()
    }

    /// KubeVirt installed by the reference operator, with the KubeVirt resource of the release.
    pub async fn reference(&self) -> Result<Arc<Lab>> {
        self.reference.get_or_try_init(|| start(KubeVirtInstaller::Reference { custom_resource: None })).await.cloned()
    }

    /// KubeVirt installed by our virt-operator, from this executable.
    pub async fn ours(&self, program: &Path) -> Result<Arc<Lab>> {
        let ours = || KubeVirtInstaller::Ours { program: program.to_owned(), custom_resource: None };
        self.ours.get_or_try_init(|| start(ours())).await.cloned()
    }

    fn started(&self) -> impl Iterator<Item = &Arc<Lab>> {
        [&self.plain, &self.reference, &self.ours].into_iter().filter_map(OnceCell::get)
    }

    /// Resolves when one of the started labs fails.
    async fn failed(&self) -> anyhow::Error {
        loop {
            let labs: Vec<_> = self.started().cloned().collect();
            let failures = labs.iter().map(|lab| Box::pin(lab.health().failed()));
            let next_check = tokio::time::sleep(Duration::from_millis(500));
            if labs.is_empty() {
                next_check.await;
                continue;
            }
            tokio::select! {
                (failure, ..) = futures::future::select_all(failures) => return failure,
                () = next_check => {}
            }
        }
    }
}

async fn start(kubevirt: KubeVirtInstaller) -> Result<Arc<Lab>> {
    Lab::start(LabOptions { kubevirt, ..LabOptions::default() }).await.map(Arc::new)
}

/// Compares the permissions of an account with those that it used in any lab of the suite.
struct PermissionCheck {
    account: &'static str,
    used: Mutex<BTreeSet<UsedPermission>>,
    check: fn(&BTreeSet<UsedPermission>) -> Result<()>,
}

impl PermissionCheck {
    /// Reads the audit logs of a lab.
    fn read(&self, lab: &Path) -> Result<()> {
        for log in audit::LOGS.map(|name| lab.join(name)).iter().filter(|log| log.is_file()) {
            let used = audit::used_permissions(log, self.account)?;
            self.used.lock().unwrap_or_else(PoisonError::into_inner).extend(used);
        }
        Ok(())
    }
}

/// Collects tests and runs them.
pub struct Suite {
    runtime: Arc<Runtime>,
    labs: Arc<SharedLabs>,
    timeout: Duration,
    trials: Vec<Trial>,
    permissions: Option<Arc<PermissionCheck>>,
}

impl Suite {
    fn new() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_stack_size(STACK)
            .enable_all()
            .build()
            .context("starting tokio")?;
        Ok(Suite {
            runtime: Arc::new(runtime),
            labs: Arc::default(),
            timeout: timeout()?,
            trials: Vec::new(),
            permissions: None,
        })
    }

    /// Calls `check` after all tests with the permissions that service accounts of this name used in their labs. It is not
    /// called if only some tests run. Call this before the first test is added.
    pub fn check_permissions(&mut self, account: &'static str, check: fn(&BTreeSet<UsedPermission>) -> Result<()>) {
        self.permissions = Some(Arc::new(PermissionCheck { account, used: Mutex::default(), check }));
    }

    /// The result of [`Suite::check_permissions`].
    fn permissions(&self) -> Result<()> {
        let Some(permissions) = &self.permissions else { return Ok(()) };
        self.labs.started().try_for_each(|lab| permissions.read(lab.folder()))?;
        (permissions.check)(&permissions.used.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a test. It fails if it returns an error or panics.
    pub fn test<T>(&mut self, name: &'static str, test: impl FnOnce(Arc<SharedLabs>) -> T + Send + 'static)
    where
        T: Future<Output = Result<()>> + Send + 'static,
    {
        let (runtime, labs, timeout) = (self.runtime.clone(), self.labs.clone(), self.timeout);
        let permissions = self.permissions.clone();
        self.trials.push(Trial::test(name, move || {
            let task = runtime.spawn({
                let labs = labs.clone();
                async move {
                    tokio::select! {
                        result = TEST.scope(name, test(labs.clone())) => result,
                        failure = labs.failed() => Err(failure),
                        () = tokio::time::sleep(timeout) => Err(anyhow!("timed out after {timeout:?}")),
                    }
                }
            });
            let result = runtime.block_on(task).unwrap_or_else(|panic| Err(anyhow!("{}", panic_message(panic))));
            let result = result.map_err(|error| {
                let logs = keep_logs(name).unwrap_or_else(|error| format!("cannot keep the logs: {error:#}"));
                Failed::from(format!("{error:#}\n{logs}"))
            });
            let read = permissions.as_ref().map_or(Ok(()), |permissions| read_stopped_labs(name, permissions));
            let result = result.and_then(|()| read.map_err(|error| Failed::from(format!("{error:#}"))));
            // The logs of the test's own labs have been copied, or are not needed.
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

fn panic_message(panic: tokio::task::JoinError) -> String {
    match panic.try_into_panic() {
        Ok(panic) => panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "the test panicked".to_owned()),
        Err(error) => error.to_string(),
    }
}

fn read_stopped_labs(test: &str, permissions: &PermissionCheck) -> Result<()> {
    let labs = std::fs::read_dir(paths::stopped_labs_dir(test)?).into_iter().flatten().flatten();
    labs.map(|lab| lab.path()).try_for_each(|lab| permissions.read(&lab))
}

/// Copies the logs of running and stopped labs to disk, because the lab's tmpfs is removed with the process.
fn keep_logs(test: &str) -> Result<String> {
    let log_folder = paths::failures_dir()?.join(test);
    let _ = std::fs::remove_dir_all(&log_folder);
    for folder in [paths::run_dir()?, paths::stopped_labs_dir(test)?] {
        for lab in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if lab.path().join("logs").is_dir() {
                copy_logs(&lab.path(), &log_folder.join(lab.file_name()))?;
            }
        }
    }
    Ok(format!("the labs' logs are kept in {}", log_folder.display()))
}

pub(crate) fn copy_logs(lab: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    let logs = std::fs::read_dir(lab.join("logs")).into_iter().flatten().flatten().map(|file| file.path());
    for file in logs.chain(audit::LOGS.map(|name| lab.join(name))).filter(|file| file.is_file()) {
        std::fs::copy(&file, to.join(file.file_name().unwrap_or_default())).context("copying a log")?;
    }
    Ok(())
}

/// Runs the tests that `fill` adds, in new namespaces.
pub fn main(groups: &[ComponentGroup], fill: impl FnOnce(&mut Suite)) -> ExitCode {
    if let Err(error) = isolate::begin() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let arguments = Arguments::from_args();
    isolate::run(
        // Listing the tests requires no components.
        || if arguments.list { Ok(()) } else { components::ensure(groups) },
        || {
            let mut suite = Suite::new()?;
            fill(&mut suite);
            let conclusion = libtest_mimic::run(&arguments, std::mem::take(&mut suite.trials));
            let is_complete = conclusion.num_filtered_out == 0 && conclusion.num_ignored == 0;
            if !conclusion.has_failed() && is_complete && !arguments.list {
                suite.permissions()?;
            }
            Ok(conclusion.exit_code())
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_of_a_test_knows_the_name_of_the_test() {
        assert_eq!(current_test(), None);
        assert_eq!(TEST.scope("mine", async { current_test() }).await, Some("mine"));
    }
}
