// Runs KubeVirt's own end-to-end specs of virt-operator on a lab.
//
// The specs and their set-up are packages of KubeVirt's module. This program registers them and starts a kubelet for
// port forwarding, see kubelet.go.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"

	"kubevirt.io/kubevirt/tests/flags"
	"kubevirt.io/kubevirt/tests/framework/kubevirt"
	"kubevirt.io/kubevirt/tests/libkubevirt/config"
	"kubevirt.io/kubevirt/tests/libnode"
	"kubevirt.io/kubevirt/tests/testsuite"

	_ "kubevirt.io/kubevirt/tests/operator"
)

// What ginkgo reports a failure to, outside of `go test`.
type outcome struct{ failed bool }

func (o *outcome) Fail() { o.failed = true }

var (
	_ = ginkgo.SynchronizedBeforeSuite(testsuite.SynchronizedBeforeTestSetup, testsuite.BeforeTestSuiteSetup)
	_ = ginkgo.SynchronizedAfterSuite(testsuite.AfterTestSuiteCleanup, testsuite.SynchronizedAfterTestSuiteCleanup)
	_ = ginkgo.AfterEach(restoreCluster)
)

// Each spec leaves the cluster as it was before.
func restoreCluster() {
	testsuite.CleanNamespaces()
	libnode.CleanNodes()
	if ginkgo.CurrentSpecReport().IsSerial {
		config.UpdateKubeVirtConfigValueAndWait(testsuite.KubeVirtDefaultConfig)
	}
	testsuite.EnsureKubevirtReady()
}

func main() {
	flag.Parse()
	flags.NormalizeFlags()
	testsuite.CalculateNamespaces()
	gomega.RegisterFailHandler(ginkgo.Fail)
	suite, _ := ginkgo.GinkgoConfiguration()
	if !suite.DryRun {
		if err := serveKubelets(kubevirt.Client()); err != nil {
			fmt.Fprintln(os.Stderr, "starting the kubelets:", err)
			os.Exit(2)
		}
	}
	var result outcome
	if passed := ginkgo.RunSpecs(&result, "virt-operator"); !passed || result.failed {
		os.Exit(1)
	}
}
