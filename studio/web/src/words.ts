/** What the page says, in English and Chinese. Sentences about a plan come from the program, as it says them. */
import { createContext, useContext } from "react";

import { STUDIO_WORDS } from "./studio/words";

const WORDS = {
  ...STUDIO_WORDS,
  table: ["Table", "表"],
  verdict: ["Verdict", "结论"],
  timeline: ["Timeline", "时间线"],
  memory: ["Memory", "显存"],
  stages: ["Stages", "流水线阶段"],
  strategies: ["Strategies", "并行策略"],
  cluster: ["Cluster", "集群"],
  sources: ["Where figures come from", "数据来源"],
  files: ["Job and plan", "任务与方案文件"],
  plan: ["Plan", "方案"],
  plans: ["Plans side by side", "方案对比"],
  language: ["中文", "English"],
  theme: ["Light or dark", "浅色或深色"],
  step: ["Step", "单步时间"],
  expected: ["Expected between", "预计区间"],
  bound: ["No plan of the space is below", "空间内任何方案不低于"],
  gap: ["Gap", "差距"],
  proven: ["proven", "已证明"],
  notProven: ["not proven", "未证明"],
  fits: ["fits", "放得下"],
  doesNotFit: ["does not fit", "放不下"],
  oom: ["Out of memory", "显存溢出概率"],
  throughput: ["Tokens/s per device", "每设备 tokens/s"],
  bubble: ["Bubble", "气泡"],
  warnings: ["To know before trusting it", "使用前须知"],
  unstated: ["What the job does not state", "任务未说明的事项"],
  forward: ["forward", "前向"],
  backward: ["backward", "反向"],
  recompute: ["recompute", "重计算"],
  tail: ["after the last backward", "最后一次反向之后"],
  path: ["longest path", "关键路径"],
  stage: ["stage", "阶段"],
  chunk: ["chunk", "块"],
  microBatch: ["micro-batch", "微批"],
  before: ["before", "之前："],
  meanOfStages: ["mean of the stages", "各阶段平均"],
  idle_warmup: ["idle: warm-up", "空闲：预热"],
  idle_communication: ["idle: transfers", "空闲：传输"],
  idle_imbalance: ["idle: imbalance", "空闲：不均衡"],
  idle_cooldown: ["idle: cool-down", "空闲：收尾"],
  zoomIn: ["Zoom in", "放大"],
  zoomOut: ["Zoom out", "缩小"],
  whole: ["Whole step", "整步"],
  timelineHelp: [
    "Arrow keys move, + and - zoom, 0 shows the whole step; with a mouse drag, or turn the wheel with Ctrl.",
    "方向键移动，+ 与 - 缩放，0 显示整步；鼠标拖动，或按住 Ctrl 滚动滚轮。",
  ],
  held: ["held", "占用"],
  limit: ["limit", "上限"],
  peak: ["Peak", "峰值"],
  device: ["Device", "设备"],
  ofDevice: ["with fragments, of the device", "含碎片，占设备"],
  byCause: ["At the peak, by cause", "峰值构成"],
  overTime: ["Over the step", "随时间变化"],
  weight: ["weights", "权重"],
  gradient: ["gradients", "梯度"],
  optimizer: ["optimizer", "优化器"],
  activation: ["activations", "激活"],
  restored: ["restored for backward", "反向时恢复"],
  transient: ["working set", "工作集"],
  workspace: ["workspace", "工作空间"],
  communicator: ["communicators", "通信缓冲"],
  context: ["device context", "设备上下文"],
  reserve: ["reserve", "预留"],
  layers: ["Layers", "层数"],
  modes: ["of them", "其中"],
  onPath: ["on the longest path", "在关键路径上"],
  status: ["Status", "状态"],
  reason: ["Why", "原因"],
  filter: ["Filter, as PP=8 TP=4 or a word of the reason", "筛选，如 PP=8 TP=4，或原因中的词"],
  more: ["Show more", "显示更多"],
  boundOf: ["Bound", "下界"],
  chart: [
    "Each strategy that was placed, by its step and the peak of its fullest stage; the line is the limit. Those that were left out unplaced lie at their bound, on the lower edge. Click one to see it alone.",
    "已求解的策略按单步时间与最满阶段的显存峰值排布，横线为上限；未求解即被排除者按其下界列于底边。点击一个即可单独查看。",
  ],
  notPlaced: ["not placed", "未求解"],
  noSearch: ["No search was asked for: only the given plans are shown.", "未进行搜索：只显示给定的方案。"],
  group: ["Group", "通信组"],
  size: ["Size", "大小"],
  stride: ["Stride", "间隔"],
  level: ["Level", "层级"],
  bandwidth: ["Past each rank", "每进程带宽"],
  number: ["Number", "数量"],
  node: ["node", "节点"],
  rank: ["rank", "进程"],
  colourBy: ["Colour by", "着色依据"],
  block: ["Block", "模块"],
  timeSource: ["Time", "时间"],
  memorySource: ["Memory", "显存"],
  source: ["Source", "来源"],
  share: ["Share of the step", "占单步比例"],
  between: ["Step if it is faster or slower by", "若快或慢"],
  flips: ["Plans change places at", "方案易位于"],
  error: ["Error", "误差"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  download: ["Save", "保存"],
  again: ["Made by", "生成命令"],
  choosePlan: ["Plan shown", "当前方案"],
  skip: ["Skip to the content", "跳到正文"],
} as const;

export type Word = keyof typeof WORDS;
export type Language = "en" | "zh";

export const LanguageContext = createContext<Language>("en");

/** How `word` is said in `language`. */
export function say(language: Language, word: Word): string {
  return WORDS[word][language === "en" ? 0 : 1];
}

/** The function that says a word in the language chosen; what is no word of the page is said as it is. */
export function useWords(): (word: Word | string) => string {
  const language = useContext(LanguageContext);
  return (word) => (Object.hasOwn(WORDS, word) ? say(language, word as Word) : word);
}
