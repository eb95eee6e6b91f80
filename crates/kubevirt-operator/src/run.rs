//! `kubevirt-operator run`: settings to program. The Machine controller is started by the leader's work.

use std::{path::Path, process::ExitCode};

use runtime::{
    client::Rate,
    lease::Leadership,
    program::{Context, LeaseName, Listener, Program, SERVICE_ACCOUNT_NAMESPACE, identity, own_namespace},
};

use crate::arguments::{RunArguments, Settings};

const NAME: &str = "kubevirt-operator";
const USUAL_NAMESPACE: &str = "kubevirt-operator-system";
/// Enough to create fifty Machines in a second or two, and little for an API server.
const RATE: Rate = Rate { per_second: 200.0, burst: 400 };

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
        rate: Some(RATE),
        metrics_prefix: "kubevirt_operator",
        listeners: listeners(settings),
        lease: settings.leader_election.then(|| LeaseName { namespace, name: NAME.to_owned() }),
        identity: identity(settings.pod_name.as_deref(), &mut rand::rng()),
    }
}

/// Two addresses, or one for both when they are the same.
fn listeners(settings: &Settings) -> Vec<Listener> {
    let same = settings.metrics == settings.health;
    let metrics = Listener { bind: settings.metrics, what: "the metrics server", health: same, metrics: true };
    let health = Listener { bind: settings.health, what: "the health probe server", health: true, metrics: false };
    if same { vec![metrics] } else { vec![metrics, health] }
}
