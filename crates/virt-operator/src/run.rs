//! `virt-operator run`: settings to program. The KubeVirt controller is started by the leader's work.
//!
//! Its endpoints speak plain HTTP: the certificate that they will use is made by the installation itself, which does
//! not exist yet.

use std::{path::Path, process::ExitCode};

use runtime::{
    lease::Leadership,
    program::{Context, LeaseName, Listener, Program, SERVICE_ACCOUNT_NAMESPACE, identity, own_namespace},
};

use crate::arguments::{RunArguments, Settings};

const NAME: &str = "virt-operator";
const USUAL_NAMESPACE: &str = "kubevirt";

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let settings = Settings::try_from(arguments)?;
    // Nothing is reconciled yet: the leader's work is to lead.
    Ok(program(&settings).run(async |_: Context| Ok(async |leadership: Leadership| leadership.stop.cancelled().await)))
}

fn program(settings: &Settings) -> Program {
    let namespace = own_namespace(settings.namespace.as_deref(), Path::new(SERVICE_ACCOUNT_NAMESPACE), USUAL_NAMESPACE);
    Program {
        name: NAME,
        version: env!("CARGO_PKG_VERSION"),
        log_format: settings.log_format,
        log_level: settings.log_level,
        kubeconfig: settings.kubeconfig.clone(),
        rate: Some(settings.rate),
        metrics_prefix: "virt_operator",
        listeners: vec![Listener { bind: settings.bind, what: "the metrics server", health: true, metrics: true }],
        lease: Some(LeaseName { namespace, name: NAME.to_owned() }),
        identity: identity(settings.pod_name.as_deref(), &mut rand::rng()),
    }
}
