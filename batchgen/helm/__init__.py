"""HELM (crfm-helm 0.5.16) on batchgen: a runner, a client and a tokenizer for HELM.

    helm-run --runner-class-name batchgen.helm.runner.BatchgenRunner --local-path DIR ...

DIR/model_deployments.yaml names the client `batchgen.helm.client.BatchgenClient`, and DIR/tokenizer_configs.yaml the
tokenizer `batchgen.helm.tokenizer.BatchgenTokenizer`; recipes/helm has both files. The modules `rows` and `jobs`, which
convert requests to rows and run jobs, do not import HELM.
"""
