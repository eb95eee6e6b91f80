// Writes the data of a KubeVirt release that crates/install embeds: schemas of custom resources, common instancetypes
// and preferences, and monitoring rules, all without descriptions. Run by `cargo xtask generate --release-data`.
package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/install"
	operatorutil "kubevirt.io/kubevirt/pkg/virt-operator/util"
)

type object = map[string]any

func main() {
	var err error
	if os.Args[1] == "strategy" {
		err = strategy(os.Args[2], os.Args[3])
	} else if err = run(os.Args[1]); err == nil {
		err = fixtures(os.Args[2])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(folder string) error {
	// The namespace is a placeholder in objects that depend on it.
	strategy, err := install.GenerateCurrentInstallStrategy(&operatorutil.KubeVirtDeploymentConfig{
		Namespace:            "{namespace}",
		AdditionalProperties: map[string]string{operatorutil.AdditionalPropertiesVirtTemplateDeploymentEnabled: ""},
	}, "monitoring", "{namespace}")
	if err != nil {
		return err
	}
	own, err := components.NewKubeVirtCrd()
	if err != nil {
		return err
	}
	for _, crd := range append(strategy.CRDs(), own) {
		if err := definition(folder, plain(crd)); err != nil {
			return err
		}
	}
	if err := lines(filepath.Join(folder, "instancetypes.jsonl.gz"), plainAll(strategy.Instancetypes())); err != nil {
		return err
	}
	if err := lines(filepath.Join(folder, "preferences.jsonl.gz"), plainAll(strategy.Preferences())); err != nil {
		return err
	}
	return rules(filepath.Join(folder, "rules.json.gz"), plain(strategy.PrometheusRules()[0]))
}

// definition stores the schema once: all versions of a CRD share it.
func definition(folder string, crd object) error {
	delete(crd, "status")
	spec := crd["spec"].(object)
	var schema []byte
	for _, v := range spec["versions"].([]any) {
		version := v.(object)
		text, err := json.Marshal(version["schema"])
		if err != nil {
			return err
		}
		if schema != nil && !bytes.Equal(schema, text) {
			return fmt.Errorf("%v: versions have different schemas", spec["group"])
		}
		schema = text
		delete(version, "schema")
	}
	text, err := json.Marshal(object{"definition": crd, "schema": json.RawMessage(schema)})
	if err != nil {
		return err
	}
	name := crd["metadata"].(object)["name"].(string)
	return write(filepath.Join(folder, "crds", name+".json.gz"), text)
}

func lines(path string, objects []object) error {
	var text bytes.Buffer
	for _, o := range objects {
		line, err := json.Marshal(o)
		if err != nil {
			return err
		}
		text.Write(line)
		text.WriteByte('\n')
	}
	return write(path, text.Bytes())
}

// rules removes the texts of alerts; crates/install has its own texts.
func rules(path string, rule object) error {
	groups := rule["spec"].(object)["groups"].([]any)
	for _, g := range groups {
		for _, r := range g.(object)["rules"].([]any) {
			annotations, _ := r.(object)["annotations"].(object)
			for key := range annotations {
				if key != "summary" && key != "description" && key != "runbook_url" {
					return fmt.Errorf("unknown annotation %s of an alert", key)
				}
			}
			delete(r.(object), "annotations")
		}
	}
	text, err := json.Marshal(groups)
	if err != nil {
		return err
	}
	return write(path, text)
}

func plain(o any) object {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	var out object
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&out); err != nil {
		panic(err)
	}
	return withoutProse(out).(object)
}

func plainAll[T any](all []*T) []object {
	out := make([]object, 0, len(all))
	for _, o := range all {
		out = append(out, plain(o))
	}
	return out
}

func withoutProse(x any) any {
	switch x := x.(type) {
	case object:
		for key, value := range x {
			if _, text := value.(string); text && (key == "description" || key == "instancetype.kubevirt.io/description") {
				delete(x, key)
			} else {
				x[key] = withoutProse(value)
			}
		}
	case []any:
		for i := range x {
			x[i] = withoutProse(x[i])
		}
	}
	return x
}

func write(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	var out bytes.Buffer
	zip, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := zip.Write(text); err != nil {
		return err
	}
	if err := zip.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}
