package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	v1 "kubevirt.io/api/core/v1"

	"kubevirt.io/kubevirt/pkg/virt-operator/resource/apply"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/install"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/rbac"
	operatorutil "kubevirt.io/kubevirt/pkg/virt-operator/util"
)

// fixtures writes the output of the release for the cases in crates/install/tests/reference.
func fixtures(folder string) error {
	if err := strategies(folder); err != nil {
		return err
	}
	if err := patches(folder); err != nil {
		return err
	}
	return operator(folder)
}

// operator writes the manifests of the release for its own operator.
func operator(folder string) error {
	const namespace, version, none = "kubevirt", "v1.8.4", ""
	deployment := components.NewOperatorDeployment(namespace, "quay.io/kubevirt", none, version, "2", version,
		none, none, none, none, none, none, none, none, none, none, none, none, none, none, corev1.PullIfNotPresent)
	all := []object{plain(components.NewKubeVirtPriorityClassCR())}
	for _, o := range append(rbac.GetAllOperator(namespace), deployment) {
		all = append(all, plain(o))
	}
	// Small enough to review as text; the other files are not.
	text, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "operator.expected.json"), append(text, '\n'), 0o644)
}

type strategyCase struct {
	Name             string
	Environment      map[string]string
	MonitorNamespace string
	KubeVirt         v1.KubeVirt
}

// strategies writes the configuration and every object that is not release data, for each resource and environment. Each
// case runs in its own process, because the release stores its monitoring rules in a global variable.
func strategies(folder string) error {
	var cases []strategyCase
	if err := read(filepath.Join(folder, "strategies.json"), &cases); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	out := object{}
	for i, c := range cases {
		command := exec.Command(self, "strategy", folder, strconv.Itoa(i))
		command.Stderr = os.Stderr
		command.Env = os.Environ()
		for name, value := range c.Environment {
			command.Env = append(command.Env, name+"="+value)
		}
		text, err := command.Output()
		if err != nil {
			return err
		}
		out[c.Name] = json.RawMessage(text)
	}
	return written(filepath.Join(folder, "strategies.expected.json.gz"), out)
}

// strategy prints the result of one case.
func strategy(folder, index string) error {
	var cases []strategyCase
	if err := read(filepath.Join(folder, "strategies.json"), &cases); err != nil {
		return err
	}
	i, err := strconv.Atoi(index)
	if err != nil {
		return err
	}
	config := operatorutil.GetTargetConfigFromKV(&cases[i].KubeVirt)
	generated, err := loaded(config, cases[i].MonitorNamespace)
	if err != nil {
		return err
	}
	text, err := config.GetJson()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(object{"config": text, "objects": objects(generated)})
}

// loaded returns the strategy as the operator uses it: written to a ConfigMap and read back, which changes it.
func loaded(config *operatorutil.KubeVirtDeploymentConfig, monitorNamespace string) (*install.Strategy, error) {
	configMap, err := install.NewInstallStrategyConfigMap(config, monitorNamespace, config.Namespace)
	if err != nil {
		return nil, err
	}
	configMap.Name = "strategy"
	store := cache.NewStore(cache.MetaNamespaceKeyFunc)
	if err := store.Add(configMap); err != nil {
		return nil, err
	}
	return install.LoadInstallStrategyFromCache(operatorutil.Stores{InstallStrategyConfigMapCache: store}, config)
}

// patches writes the objects that the customizer of the release returns, or that it returns an error.
func patches(folder string) error {
	var cases []struct {
		Name                string
		CustomizeComponents v1.CustomizeComponents
	}
	if err := read(filepath.Join(folder, "patches.json"), &cases); err != nil {
		return err
	}
	out := object{}
	fresh := func() (*install.Strategy, error) {
		config := &operatorutil.KubeVirtDeploymentConfig{Namespace: "kubevirt", Registry: "r", KubeVirtVersion: "v1"}
		return loaded(config, "")
	}
	for _, c := range cases {
		before, err := fresh()
		if err != nil {
			return err
		}
		strategy, err := fresh()
		if err != nil {
			return err
		}
		customizer, err := apply.NewCustomizer(c.CustomizeComponents)
		if err != nil {
			return err
		}
		if err := customizer.Apply(strategy); err != nil {
			out[c.Name] = object{"error": true}
			continue
		}
		out[c.Name] = object{"hash": customizer.Hash(), "objects": changed(objects(before), objects(strategy))}
	}
	return written(filepath.Join(folder, "patches.expected.json.gz"), out)
}

// changed returns the objects in which the customizer changed more than its own annotation.
func changed(before, after []object) []object {
	known := map[string]bool{}
	for _, o := range before {
		text, _ := json.Marshal(o)
		known[string(text)] = true
	}
	out := []object{}
	for _, o := range after {
		metadata := o["metadata"].(object)
		if annotations, ok := metadata["annotations"].(object); ok {
			delete(annotations, v1.KubeVirtCustomizeComponentAnnotationHash)
			if len(annotations) == 0 {
				delete(metadata, "annotations")
			}
		}
		text, _ := json.Marshal(o)
		if !known[string(text)] {
			out = append(out, o)
		}
	}
	return out
}

func objects(s *install.Strategy) []object {
	out := []object{}
	add := func(o runtime.Object) {
		out = append(out, withoutLogic(plain(o)))
	}
	all(s.ServiceAccounts(), add)
	all(s.ClusterRoles(), add)
	all(s.ClusterRoleBindings(), add)
	all(s.Roles(), add)
	all(s.RoleBindings(), add)
	all(s.Services(), add)
	all(s.CertificateSecrets(), add)
	all(s.ValidatingWebhookConfigurations(), add)
	all(s.MutatingWebhookConfigurations(), add)
	all(s.ValidatingAdmissionPolicyBindings(), add)
	all(s.ValidatingAdmissionPolicies(), add)
	all(s.APIServices(), add)
	all(s.Deployments(), add)
	all(s.DaemonSets(), add)
	all(s.SCCs(), add)
	all(s.ServiceMonitors(), add)
	all(s.PrometheusRules(), add)
	all(s.ConfigMaps(), add)
	all(s.Routes(), add)
	sort.SliceStable(out, func(i, j int) bool { return title(out[i]) < title(out[j]) })
	return out
}

func all[T runtime.Object](list []T, add func(runtime.Object)) {
	for _, o := range list {
		add(o)
	}
}

func title(o object) string {
	metadata := o["metadata"].(object)
	namespace, _ := metadata["namespace"].(string)
	return o["kind"].(string) + "/" + namespace + "/" + metadata["name"].(string)
}

// withoutLogic removes what crates/install defines itself: the CEL of policies and the texts of alerts.
func withoutLogic(o object) object {
	delete(o, "status")
	switch o["kind"] {
	case "ValidatingAdmissionPolicy":
		for _, field := range []string{"validations", "variables", "matchConditions"} {
			delete(o["spec"].(object), field)
		}
	case "PrometheusRule":
		for _, g := range o["spec"].(object)["groups"].([]any) {
			for _, r := range g.(object)["rules"].([]any) {
				if annotations, ok := r.(object)["annotations"].(object); ok {
					delete(annotations, "summary")
				}
			}
		}
	}
	return o
}

func read(path string, into any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

func written(path string, o object) error {
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	return write(path, text)
}
