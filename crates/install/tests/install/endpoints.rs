//! The endpoints whose certificates virt-operator reads exist in the objects that it installs. A probe of another port
//! or a comparison with another Secret reports nothing, or reports every pod.

use serde_json::Value;
use vitivirt_install::{
    Kind,
    served::{ENDPOINTS, Endpoint},
};

use super::manifests::{largest_installation, ours};

/// The Deployments of the operator and of everything that it can install.
fn deployments() -> Vec<Value> {
    let strategy = largest_installation();
    let installed = strategy.items().iter().filter(|item| item.kind == Kind::Deployment);
    let installed = installed.map(|item| item.object().unwrap());
    let operator = ours("kubevirt").into_values().filter(|object| object["kind"] == "Deployment");
    installed.chain(operator).collect()
}

fn list<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    object.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

/// The containers of a Deployment that listen on a port.
fn listeners(deployment: &Value, port: u16) -> Vec<&Value> {
    let containers = list(deployment, "/spec/template/spec/containers");
    containers.filter(|container| list(container, "/ports").any(|found| found["containerPort"] == port)).collect()
}

/// Whether a container mounts a Secret.
fn mounts(deployment: &Value, container: &Value, secret: &str) -> bool {
    let mut volumes = list(deployment, "/spec/template/spec/volumes");
    let volume = volumes.find(|volume| volume.pointer("/secret/secretName").is_some_and(|name| name == secret));
    volume.is_some_and(|volume| list(container, "/volumeMounts").any(|mount| mount["name"] == volume["name"]))
}

#[test]
fn every_endpoint_is_a_port_of_a_container_that_mounts_its_secret() {
    let deployments = deployments();
    for endpoint in &ENDPOINTS {
        let Endpoint { deployment: name, port, secret } = *endpoint;
        let deployment = deployments.iter().find(|found| found["metadata"]["name"] == name);
        let deployment = deployment.unwrap_or_else(|| panic!("no Deployment {name}"));
        let listeners = listeners(deployment, port);
        assert_eq!(listeners.len(), 1, "containers of {name} with port {port}");
        // The operator reads its own certificate from the API server, because it installs the Secret itself.
        let is_mounted = name != "virt-operator";
        assert_eq!(mounts(deployment, listeners[0], secret), is_mounted, "{name} and Secret {secret}");
    }
}
