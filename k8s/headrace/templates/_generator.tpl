{{/* A generator's pod. Argument: root context, command, whether it answers probes, number of accelerators. */}}
{{- define "headrace.generatorPod" -}}
{{- $root := index . 0 -}}{{- $command := index . 1 -}}{{- $probes := index . 2 -}}{{- $gpus := index . 3 -}}
{{- $me := list $root "generator" -}}
metadata: {{- include "headrace.podMeta" $me | nindent 2 }}
spec:
  {{- include "headrace.podCommon" $me | nindent 2 }}
  terminationGracePeriodSeconds: {{ $root.Values.generator.terminationGracePeriodSeconds }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "headrace.selector" $me | nindent 10 }}
  {{- if and $root.Values.generator.resourceClaim.enabled (eq $root.Values.device "gpu") }}
  resourceClaims:
    - {name: gpus, resourceClaimTemplateName: {{ include "headrace.fullname" $root }}-generator}
  {{- end }}
  containers:
    - name: generator
      {{- include "headrace.container" $me | nindent 6 }}
      command: {{- toYaml $command | nindent 8 }}
      env: {{- include "headrace.lastOfEach" (include "headrace.generatorEnv" $me) | nindent 8 }}
      {{- if $probes }}
      {{- include "headrace.probes" $me | nindent 6 }}
      {{- end }}
      resources: {{- include "headrace.resources" (list $root "generator" $gpus) | nindent 8 }}
      volumeMounts: {{- include "headrace.mounts" $me | nindent 8 }}
  volumes: {{- include "headrace.volumes" $me | nindent 4 }}
{{- end -}}
